"""What TRL and verl weight tokens by that another policy has drawn, recorded for a test of ours.

    pip install --no-deps --target FOLDER trl==1.16.0 verl==0.9.1
    python -m bench.corrections FOLDER

Nothing of theirs is imported, since that needs their dependencies: the statements that compute the weights are cut
out of their files (TRL's are in the middle of a method of GRPOTrainer), and run on random log-probabilities.
Writes tests/rlhf_tasks/algorithms/corrections_of_others.json.
"""

import ast
import json
import math
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.harness import options

RECORD = Path(__file__).parents[1] / "tests" / "rlhf_tasks" / "algorithms" / "corrections_of_others.json"
LENGTHS = (6, 3, 5, 4, 2)
DRIFTS = (-0.3, -0.03, 0.0, 0.04, 0.35)  # of each response's tokens in the mean
LOWER, UPPER = 0.8, 1.3
TRL_FILE, VERL_FILE = "trl/trainer/grpo_trainer.py", "verl/trainer/ppo/rollout_corr_helper.py"
VERL_HELPERS = "verl/utils/torch_functional.py"
CONDITION = "self.use_vllm and self.vllm_importance_sampling_correction"


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of trainer and sampler, and which are of responses: [5, 6]."""
    generator = torch.Generator().manual_seed(0)
    drawn = -torch.rand(len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64) * 3
    noise = 0.15 * torch.randn(drawn.shape, generator=generator, dtype=torch.float64)
    ours = drawn + torch.tensor(DRIFTS)[:, None] + noise
    return ours, drawn, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def trl_weights(source: str, mode: str) -> torch.Tensor:
    ours, drawn, mask = batch()
    blocks = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and ast.unparse(node.test) == CONDITION
        and "vllm_importance_sampling_ratio = " in ast.unparse(node)
        and "per_token_logps_diff" in ast.unparse(node)
    ]  # fmt: skip
    (block,) = blocks
    settings = {"mode": mode, "clip_min": LOWER, "clip_max": UPPER, "correction": True}
    trainer = SimpleNamespace(
        use_vllm=True, **{f"vllm_importance_sampling_{name}": value for name, value in settings.items()}
    )
    names: dict[str, Any] = {
        "self": trainer, "torch": torch, "math": math, "tool_mask": None, "completion_mask": mask,
        "old_per_token_logps": ours, "sampling_per_token_logps": drawn,
    }  # fmt: skip
    exec(compile(ast.Module([block], []), TRL_FILE, "exec"), names)
    return names["vllm_importance_sampling_ratio"].expand_as(ours)


def functions(source: str, wanted: tuple[str, ...], names: dict[str, Any]) -> dict[str, Any]:
    """The functions of a file, with the constants that stand in it."""
    body: list[ast.stmt] = [
        node
        for node in ast.parse(source).body
        if (isinstance(node, ast.FunctionDef) and node.name in wanted)
        or (isinstance(node, ast.Assign | ast.AnnAssign) and "import" not in ast.unparse(node))
    ]
    exec(compile(ast.Module(body, []), VERL_FILE, "exec"), names)
    return names


def verl_weights(folder: Path, mode: str) -> torch.Tensor:
    ours, drawn, mask = batch()
    typing: dict[str, Any] = {"torch": torch, "math": math, "Any": Any}
    exec("from typing import *", typing)
    helpers: dict[str, Any] = dict(typing)
    tree = ast.parse((folder / VERL_HELPERS).read_text())
    body: list[ast.stmt] = [
        n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in ("masked_sum", "masked_mean")
    ]
    exec(compile(ast.Module(body, []), VERL_HELPERS, "exec"), helpers)
    wanted = (
        "_parse_rollout_is_threshold", "_parse_rollout_rs_thresholds", "compute_rollout_rejection_mask",
        "compute_rollout_correction_weights", "compute_rs_metrics",
    )  # fmt: skip
    source = (folder / VERL_FILE).read_text()
    names = functions(
        source, wanted, {**typing, "verl_F": SimpleNamespace(**helpers), "compute_is_metrics": lambda **_: {}}
    )
    level, kind = mode.split("_")
    change, masks = ours - drawn, mask.double()
    if level == "geometric":
        inverse = f"{1 / UPPER}_{1 / LOWER}"  # its bounds are of p_drawn / p_trainer
        kept, _ = names["compute_rollout_rejection_mask"](change, masks, "seq_mean_k1", inverse)
        return kept
    bounds = UPPER if kind == "truncate" else f"{LOWER}_{UPPER}"
    return names["compute_rollout_correction_weights"](change, masks, level, bounds)[0]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    versions = {each.name: each.version for each in distributions(path=[str(folder)])}
    ours, drawn, mask = batch()
    modes = [f"{level}_{kind}" for level in ("token", "sequence") for kind in ("truncate", "mask")]
    trl = (folder / TRL_FILE).read_text()
    weights = {f"trl {mode}": trl_weights(trl, mode) for mode in modes}
    weights |= {f"verl {mode}": verl_weights(folder, mode) for mode in (*modes, "geometric_mask")}
    record = {
        "sources": {f"trl {versions['trl']}": TRL_FILE, f"verl {versions['verl']}": VERL_FILE},
        "lengths": LENGTHS,
        "bounds": [LOWER, UPPER],
        "change": (ours - drawn)[mask].tolist(),
        "weights": {name: of[mask].tolist() for name, of in weights.items()},
    }
    RECORD.write_text(json.dumps(record) + "\n")
    print(f"{len(weights)} ways of {', '.join(record['sources'])}: {RECORD}")


if __name__ == "__main__":
    main()
