"""Whole PPO runs by the command line on this machine's devices: planned beside measured, a killed rank, offloading.

    python -m bench.whole_runs [--size tiny|110m|1b] [--rows again killed offload] [--iterations 6] [--folder DIR]
                               [--out FILE]

The models are Llamas with random weights, which answer every prompt at full length. Their profile is measured first
(`prefect-rlhf profile`), and `plan: auto` chooses the plan of the first row, which the others follow:

    planned   undisturbed, always run: seconds and bytes of each call, planned and measured
    again     the same once more
    killed    SIGKILL to rank 0 when it has trained in the third iteration; the run replaces it and continues
    offload   the optimizers' state is kept in host memory

The last commits of the others are compared with that of `planned`, byte by byte; `unlike` lists the metrics of the
first iteration in which any differ. Prints one JSON line per row. Exit status 1 when a commit differs.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from bench.harness import command, options
from bench.models import sizes, write_model
from prefect_rlhf.flows.demo import write_jsonl
from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder
from prefect_rlhf.rlhf_tasks.checkpoint.journals import METRICS
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import verify
from prefect_rlhf.rlhf_tasks.config.cluster import ByHand
from prefect_rlhf.rlhf_tasks.spec import CallNode, ExecutionPlan


class Size(NamedTuple):
    """A model, and the work of one iteration: sequences of prompt_tokens and new_tokens each."""

    model: Mapping[str, Any]
    batch_size: int
    prompt_tokens: int
    new_tokens: int


SIZES = {
    "tiny": Size(sizes(128, 2, 4, 2, 384, 512), 16, 16, 16),
    "110m": Size(sizes(768, 12, 12, 12, 2048, 32000), 128, 128, 128),
    "1b": Size(sizes(2048, 16, 32, 8, 8192, 128256), 128, 128, 256),
}
ROWS = ("again", "killed", "offload")
SAVES = ("time/save_actor", "time/save_critic")
TIMED = ("time/", "throughput/", "mfu")  # how metrics begin that no two runs have alike
COMMIT_EVERY = 2  # iterations
KILLED = "trained:kill@rank0@iter2@gen0"
REWARD = (
    "def longest(prompts, completions, **columns):\n    return [float(len(set(c))) for c in completions]\n"
)


def write_inputs(folder: Path, size: Size) -> int:
    """The folder `model`, prompts and a reward; gives the model's number of parameters."""
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**size.model | {"eos_token_id": size.model["vocab_size"]}))
    write_model(model.to(torch.bfloat16), folder / "model")
    rows = ({"prompt": f"{number:04d}".ljust(size.prompt_tokens, ".")} for number in range(1024))
    write_jsonl(folder / "prompts.jsonl", rows)
    (folder / "reward.py").write_text(REWARD)
    return model.num_parameters()


def document_of(folder: Path, size: Size, iterations: int) -> dict[str, Any]:
    """The configuration that all rows share."""
    return {
        "type": "ppo",
        "models": {"actor": str(folder / "model")},
        "data": {"train": str(folder / "prompts.jsonl"), "max_prompt_tokens": size.prompt_tokens},
        "sampling": {"max_completion_length": size.new_tokens},
        "rewards": [{"function": f"{folder / 'reward.py'}:longest"}],
        "output_dir": str(folder / "runs"),
        "batch_size": size.batch_size,
        "num_mini_batches": 2,
        "total_iterations": iterations,
        "snapshot_every": COMMIT_EVERY,
        "cluster": {"devices_per_host": 1},
        "plan": "auto",
    }


def manual(plan: ExecutionPlan, offload: bool) -> dict[str, str]:
    """The plan's choices as a configuration's `plan`, with or without offloaded optimizers."""
    return {
        node.name: str(
            ByHand.of(node.assignment)._replace(offload=offload and node.name.endswith("_train"), order=None)
        )
        for node in plan.nodes
        if isinstance(node, CallNode)
    }


def run(folder: Path, name: str, document: dict[str, Any], failpoint: str = "") -> dict[str, Any]:
    """A run to its end. Returns its figures, the files of its last commit and its plan; its folder is removed."""
    file, found = folder / f"{name}.yaml", folder / "runs" / name
    file.write_text(yaml.safe_dump({**document, "name": name}))
    seconds = command("run", "ppo", "--config", str(file), log=folder / f"{name}.log", failpoint=failpoint)
    summary = json.loads((found / "summary.json").read_text())
    files = verify(step_folder(found, document["total_iterations"])).files
    metrics = [json.loads(line) for line in (found / METRICS).read_text().splitlines()]
    plan = ExecutionPlan.model_validate_json((found / "plan.json").read_text())
    shutil.rmtree(found)
    return {
        "row": name,
        "seconds": round(seconds, 1),
        "seconds_per_iteration": summary["seconds_per_iteration"],
        "waits_for_copies_s": [round(sum(row[name] for name in SAVES if name in row), 3) for row in metrics],
        "commit_bytes": sum(stored.size_bytes for stored in files),
        **{
            key: summary["planned_and_measured"][key]
            for key in ("iteration", "calls", "call_memory_bytes", "peak_memory_bytes")
        },
        "files": sorted((stored.size_bytes, stored.sha256) for stored in files),
        "metrics": metrics,
        "plan": plan,
    }


def unlike(rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics, times and rates aside, that differ in the first iteration in which any do: name -> both values."""
    for row, other in zip(rows, others, strict=True):
        found = {
            name: (row.get(name), other.get(name))
            for name in sorted(row.keys() | other.keys())
            if not name.startswith(TIMED) and row.get(name) != other.get(name)
        }
        if found:
            return {"iteration": row["iteration"], **found}
    return {}


def tell(row: Mapping[str, Any], out: Path | None) -> None:
    """Print a row, and append it to a file."""
    line = json.dumps({key: value for key, value in row.items() if key not in ("files", "metrics", "plan")})
    print(line, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")


def measure(arguments: argparse.Namespace, folder: Path) -> bool:
    """Do the rows; whether all commits are equal."""
    size = SIZES[arguments.size]
    head = {
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "size": arguments.size,
        "parameters": write_inputs(folder, size),
    }
    document = document_of(folder, size, arguments.iterations)
    (folder / "profile.yaml").write_text(yaml.safe_dump(document))
    profile_s = command("profile", "--config", str(folder / "profile.yaml"))
    tell({**head, "profile_s": round(profile_s, 1)}, arguments.out)
    planned = run(folder, "planned", document)
    tell({**planned, "choices": manual(planned["plan"], offload=False)}, arguments.out)
    equal = True
    for name in arguments.rows:
        changed = {**document, "plan": manual(planned["plan"], name == "offload")}
        row = run(folder, name, changed, KILLED if name == "killed" else "")
        row["same_bytes"] = row["files"] == planned["files"]
        row["unlike"] = unlike(row["metrics"], planned["metrics"])
        equal = equal and row["same_bytes"]
        tell(row, arguments.out)
    return equal


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--size", choices=SIZES, default="110m")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=ROWS, help="besides `planned`")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=None, help="on a disk with room for three commits")
    parser.add_argument("--out", type=Path, default=None, help="append the rows to a file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        return int(not measure(arguments, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
