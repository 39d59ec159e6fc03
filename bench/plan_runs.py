"""Plans on a pool of ranks: the demo's models, a profile measured on the ranks, and runs in the order of the plan.

The ranks use the real executor; only the runtime around it is replaced, by a loop in plan order.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, set_seed

from bench.harness import RankPool, Store
from flows.demo import MODEL, byte_tokenizer
from flows.run.planning import hardware_of, problem_of
from planner.pricing.analytic import recalibrated
from planner.pricing.calls import CostModel
from planner.pricing.devices import preset
from planner.pricing.figures import MeasuredProfile
from planner.pricing.plans import PlanPrice, price_plan
from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.algorithms.ppo import PPOConfig
from rlhf_tasks.config.base import RunConfig
from rlhf_tasks.parallel.layout.weight_files import read_shape
from rlhf_tasks.profiling.measurements import Grid, Measurements, ProfileSpec, pieces_of, profile_plan
from rlhf_tasks.protocol.messages import GenerationSpec
from rlhf_tasks.spec import ExecutionPlan

GROUP_TIMEOUT_S = 600.0
NEVER = 10**9  # iterations
DEVICE = "cpu-slot"


def write_models(folder: Path) -> None:
    """Write the folders `actor` (language model) and `reward` (scalar head), of the demo's shape.

    Their end token is outside the vocabulary, so that every response has the maximum length.
    """
    for name, kind in (("actor", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        config = LlamaConfig(**{**MODEL, "eos_token_id": MODEL["vocab_size"], "num_labels": 1})
        set_seed(0)
        kind(config).save_pretrained(folder / name)
        byte_tokenizer().save(str(folder / name / "tokenizer.json"))


def ppo_of(
    folder: Path, n_ranks: int, batch_size: int, prompt_tokens: int, new_tokens: int, **changes: Any
) -> PPOConfig:
    """A PPO configuration for the models in a folder (`write_models`), with prompts and responses of fixed length.

    prompt_tokens, new_tokens  tokens of every prompt and of every response
    changes                    further keys of the configuration
    """
    prompts = folder / f"prompts-{prompt_tokens}.jsonl"
    if not prompts.exists():
        rows = [{"prompt": f"{i:04d}".ljust(prompt_tokens, ".")} for i in range(1024)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "type": "ppo",
        "dtype": "float32",
        "models": {"actor": str(folder / "actor"), "reward": str(folder / "reward")},
        "data": {"train": str(prompts)},
        "output_dir": str(folder / "runs"),
        "sampling": {"max_completion_length": new_tokens},
        "batch_size": batch_size,
        "num_mini_batches": 2,
        "total_iterations": 1000,
        "cluster": {"devices_per_host": n_ranks},
    }
    config = make_config({**document, **changes})
    assert isinstance(config, PPOConfig)
    return config


def measured_profile(
    pool: RankPool, model: Path, n_seqs: int, prompt_tokens: int, total_tokens: int
) -> MeasuredProfile:
    """Measure layers and collectives of a model on the ranks, for batches of up to n_seqs sequences.

    model                        its folder
    prompt_tokens, total_tokens  tokens of the longest prompt and of the longest sequence
    """
    n_ranks, shape = pool.n_ranks, read_shape(str(model))
    grid = Grid.around(n_seqs, prompt_tokens, total_tokens, shape.context)
    pieces = pieces_of({str(model): grid}, n_ranks, n_ranks)
    spec = ProfileSpec(dtype="float32", devices_per_host=n_ranks, pieces=pieces)
    plan = profile_plan(pieces, n_ranks, n_ranks)
    per_rank = pool.run(
        measure_pieces, plan.model_dump_json(), spec.model_dump(mode="json"), str(model.parent)
    )
    measured = [piece for pieces, _ in per_rank for piece in pieces]
    dispatch_s = max(seconds for _, seconds in per_rank)
    return MeasuredProfile.of(DEVICE, 1, n_ranks, shape, 4, measured, dispatch_s)


def predicted(config: RunConfig, plan: ExecutionPlan, profile: MeasuredProfile) -> PlanPrice:
    """What a plan of a configuration takes, as `plan: auto` prices it, from the profile."""
    asked = problem_of(config, hardware_of(config)).model
    device = recalibrated(preset(DEVICE), profile)
    model = CostModel(asked.cluster, device, asked.models, asked.workload, [profile])
    return price_plan(plan, model)


class NodeTime(NamedTuple):
    """One node of one iteration on one rank; times by the host's monotonic clock.

    cpu_s    CPU seconds of all threads of the process, for comparisons on a busy machine
    metrics  that the rank reports of the node
    """

    iteration: int
    node: str
    started_s: float
    ended_s: float
    cpu_s: float
    metrics: Mapping[str, float]


class PlanRun(NamedTuple):
    """One rank's figures of a plan: the times of its nodes, and its peak memory."""

    times: Sequence[NodeTime]
    peak_bytes: int


def run_plan(
    rank: int,
    store: Store,
    plan_json: str,
    config: Mapping[str, Any],
    folder: str,
    iterations: int,
) -> PlanRun:
    """Run a plan's iterations in the order in which the runtime delivers them: plan order, at most two in flight."""
    import torch.distributed as dist

    from rlhf_tasks.protocol.sequencer import Sequencer
    from rlhf_tasks.rank.plan_nodes import NodeExecutor
    from rlhf_tasks.system.rank_process import give_back
    from tests.rlhf_tasks.settings import DEADLINES

    host, port, prefix = store
    plan = ExecutionPlan.model_validate_json(plan_json)
    executor = NodeExecutor(rank, lambda part: None)
    give_back()
    executor.load(generation_spec(rank, store, plan, config, folder))
    ended = dist.PrefixStore(f"{prefix}-ended", dist.TCPStore(host, port, is_master=False))
    sequencer, times, peak = Sequencer(plan, prefix, 0, DEADLINES), [], 0
    for iteration in range(iterations):
        if iteration >= 2:
            ended.wait([f"{iteration - 2}/{other}" for other in range(plan.n_devices)])
        for request in sequencer.requests(iteration, in_snapshot=False).get(rank, ()):
            started_s, cpu_s = time.monotonic(), time.process_time()
            result = executor.execute(request, plan.node(request.key.node))
            used_s = time.process_time() - cpu_s
            peak = max(peak, result.peak_bytes)
            times.append(
                NodeTime(iteration, request.key.node, started_s, time.monotonic(), used_s, result.metrics)
            )
        ended.set(f"{iteration}/{rank}", "")
    executor.close()
    return PlanRun(times, peak)


def measure_pieces(
    rank: int, store: Store, plan_json: str, config: Mapping[str, Any], folder: str
) -> tuple[list[Measurements], float]:
    """Run a profile's plan (rlhf_tasks/profiling/measurements.py).

    Returns this rank's measurements, node by node, and the seconds that a node without work takes.
    """
    from rlhf_tasks.profiling.measure import ProfileExecutor

    plan = ExecutionPlan.model_validate_json(plan_json)
    executor = ProfileExecutor(rank)
    executor.load(generation_spec(rank, store, plan, config, folder))
    pieces = ProfileSpec.model_validate(config).pieces
    measured = [executor.measure(pieces[node.name]) for node in plan.nodes]
    idle = [piece for piece in pieces.values() if piece.kind == "idle"]
    started_s = time.monotonic()
    for piece in idle:
        executor.measure(piece)
    dispatch_s = (time.monotonic() - started_s) / len(idle)
    executor.close()
    return measured, dispatch_s


def generation_spec(
    rank: int, store: Store, plan: ExecutionPlan, config: Mapping[str, Any], folder: str
) -> GenerationSpec:
    """The specification that a controller would send to a rank: of a new run whose save nodes never write."""
    host, port, prefix = store
    return GenerationSpec(
        run=prefix,
        attempt=0,
        generation=0,
        rank=rank,
        n_ranks=plan.n_devices,
        plan=plan,
        config=dict(config),
        run_folder=folder,
        restore_step=None,
        iterations=NEVER,
        store_host=host,
        store_port=port,
        store_prefix=prefix,
        timeout_s=GROUP_TIMEOUT_S,
    )
