"""What the checksums of movements cost: their share of the CPU seconds of a PPO run's ranks.

    python -m bench.digests [--hidden 128] [--batch 64] [--iterations 3]

Two CPU ranks with one thread each. The plan moves everything that can move: samples, parameters to copies, frozen
models and optimizers to and from host memory, and a commit after each iteration. The first iteration is left out.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.harness import Store, on_ranks, options
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.checkpoint import snapshots
from prefect_rlhf.rlhf_tasks.parallel.batch import redistribution
from prefect_rlhf.rlhf_tasks.parallel.comm import host_memory, reallocation
from prefect_rlhf.rlhf_tasks.parallel.train import optimizer
from prefect_rlhf.rlhf_tasks.protocol.messages import GenerationSpec
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import NodeExecutor
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.rlhf_tasks.settings import DEADLINES
from tests.tiny_runs import ppo_config, write_model, write_prompts

RANKS = 2
PLAN = {
    "actor_generate": "0-1 d2",
    "ref_inference": "0-1 t2 offload",
    "reward_inference": "0-1 p2 m2 offload",
    "critic_inference": "0-1 t2",
    "actor_train": "0-1 t2 m2 offload",
    "critic_train": "0-1 p2 m2 offload",
}
WHERE = {
    "samples": [(redistribution, name) for name in ("checksum", "checksums", "require_same")],
    "parameters to copies": [(reallocation, "digests")],
    "host memory and back": [(host_memory, name) for name in ("checksums", "require_same")],
    "optimizer state in a step": [(optimizer, name) for name in ("checksums", "require_same")],
    "commits": [(snapshots, "state_sums")],
}
"""What moves -> (module, function): who spends seconds on checksums of it."""


def timed(work: Callable[..., Any], spent: Counter[str], what: str) -> Callable[..., Any]:
    def measured(*how: Any, **further: Any) -> Any:
        began_s = time.thread_time()
        try:
            return work(*how, **further)
        finally:
            spent[what] += time.thread_time() - began_s  # type: ignore[assignment]

    return measured


def iterate(
    rank: int, store: Store, plan_json: str, config: dict, folder: str, iterations: int
) -> dict[str, float]:
    """CPU seconds of a rank's engine in the iterations after the first: of each kind of movement, and of all."""
    torch.set_num_threads(1)
    spent, plan = Counter[str](), ExecutionPlan.model_validate_json(plan_json)
    for what, places in WHERE.items():
        for module, name in places:
            setattr(module, name, timed(getattr(module, name), spent, what))
    host, port, prefix = store
    spec = GenerationSpec(
        run="digests",
        attempt=0,
        generation=0,
        rank=rank,
        n_ranks=RANKS,
        plan=plan,
        config=config,
        run_folder=folder,
        restore_step=None,
        iterations=iterations,
        store_host=host,
        store_port=port,
        store_prefix=prefix,
        timeout_s=600.0,
    )
    executor = NodeExecutor(rank, lambda part: None)
    executor.load(spec)
    began_s = 0.0
    for iteration in range(iterations):
        if iteration == 1:
            spent.clear()
            began_s = time.thread_time()
        for request in Sequencer(plan, "digests", 0, DEADLINES).requests(iteration).get(rank, ()):
            executor.execute(request, plan.node(request.key.node))
    whole_s = time.thread_time() - began_s
    executor.close()
    return {**{what: float(spent[what]) for what in WHERE}, "all": whole_s}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"hidden_size": asked.hidden, "intermediate_size": 3 * asked.hidden, "num_hidden_layers": 4}
        write_model(folder / "actor", **sizes)
        write_model(folder / "reward", head="scalar", seed=2, **sizes)
        write_prompts(folder / "prompts.jsonl")
        changes = {"batch_size": asked.batch, "total_iterations": asked.iterations}
        config = ppo_config(folder, plan=PLAN, cluster={"devices_per_host": RANKS}, **changes)
        prepared = prepare(make_config(config.model_dump()))
        prepared.rows.keep(folder)
        arguments = (
            prepared.plan.model_dump_json(),
            config.model_dump(mode="json"),
            str(folder),
            asked.iterations,
        )
        for rank, seconds in enumerate(on_ranks(RANKS, iterate, *arguments)):
            whole_s = seconds.pop("all")
            parts = ", ".join(f"{what} {one / whole_s:.2%}" for what, one in seconds.items())
            print(f"rank {rank}: {sum(seconds.values()) / whole_s:.2%} of {whole_s:.2f} CPU-s: {parts}")


if __name__ == "__main__":
    main()
