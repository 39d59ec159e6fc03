"""Prints what differs from TRL: of every field that has TRL's name, its default and its meaning. The site has it as a
page (docs/site.py).

    python -m bench.trl_names [--python PATH ...]

TRL's defaults are in bench/trl_defaults.json; --python, a Python of an environment with a release of TRL, reads them
anew. PPO's are those of the last release that had it.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from bench.harness import options
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.config.models import LoraConfig, OptimizerConfig
from prefect_rlhf.rlhf_tasks.config.responses import SamplingConfig

ROOT = Path(__file__).parents[1]
KEPT, READER = ROOT / "bench/trl_defaults.json", ROOT / "bench/trl_side.py"
LAST_WITH_PPO = "1.12.0"
SECTIONS = {"optimizer": OptimizerConfig, "sampling": SamplingConfig, "lora": LoraConfig}
RENAMED = {
    "lora.rank": ("lora_r",),
    "lora.alpha": ("lora_alpha",),
    "lora.targets": ("lora_target_modules",),
    "optimizer.adam_betas": ("adam_beta1", "adam_beta2"),
}
SAID_OTHERWISE = {"none": False, "full": True, (): "none", "sigmoid": ["sigmoid"]}
"""A default of ours -> the same one of TRL's, where it is written in another way."""

SAME = (
    *("report_to", "sync_ref_model", "ref_model_mixup_alpha", "num_generations", "epsilon"),
    *("num_iterations", "mask_truncated_completions", "importance_sampling_level", "delta"),
    *("optimizer.weight_decay", "optimizer.adam_epsilon", "optimizer.max_grad_norm", "sampling.top_p"),
    *("sampling.top_k", "lora.rank", "lora.alpha", "desirable_weight", "undesirable_weight"),
    *("center_rewards_coefficient", "num_mini_batches", "missing_eos_penalty", "kl_coef", "kl_estimator"),
    *("gamma", "lam", "whiten_rewards", "cliprange", "cliprange_value"),
)
"""Fields that have TRL's name, meaning and default."""

MEANING: Mapping[str, str] = dict.fromkeys(SAME, "") | {
    "output_dir": "the folder of all run folders",
    "seed": "any number will do",
    "push_to_hub": "the repository's name (TRL's `hub_model_id`), not a switch; null: no push",
    "gradient_checkpointing": "it costs a forward pass; a run whose activations do not fit says so and names it",
    "ref_model_sync_steps": "counts iterations; TRL's counts optimizer steps",
    "beta": "GRPO: TRL also weights the KL term by the policy ratio (`use_bias_correction_kl`)",
    "epsilon_high": "with `loss_type: cispo` the ratio's bound is 1 + it; TRL's is the bound itself",
    "scale_rewards": "no `true`, `false`: `group`, `none`",
    "loss_type": "GRPO's is the paper's; `type: dapo` has the other. No lists of several losses",
    "optimizer.learning_rate": "one for all algorithms: choose it for the model. TRL's 1e-4 is meant for LoRA",
    "optimizer.lr_scheduler_type": "so a run that is made longer has the same beginning",
    "optimizer.warmup_steps": "no share of the run: a number of steps",
    "optimizer.adam_betas": "few steps: the second moment forgets in 20 of them, not in 1,000",
    "sampling.max_completion_length": "it decides about memory and time, so it must be given",
    "sampling.temperature": "what is learned from is the model's own distribution",
    "lora.targets": "all linear layers, as in the QLoRA paper; peft's choice depends on the family",
    "label_smoothing": "the conservative loss, as TRL's was; now TRL's is only for `robust` and `exo_pair`",
    "completion_only_loss": "of `messages` the last one is learned; TRL's null learns all their tokens",
    "assistant_only_loss": "needs no `{% generation %}` marks",
    "batch_size": "samples of an iteration; TRL computes it",
    "num_ppo_epochs": "as in verl and OpenRLHF: later passes learn from an older policy's samples",
}
"""Every field of ours that has TRL's name -> how its meaning differs, or why its default does."""


class Shared(NamedTuple):
    """A field of ours that has TRL's name, with both defaults. ours: "required" where there is none"""

    field: str
    algorithm: str
    ours: Any
    theirs: Any

    @property
    def agrees(self) -> bool:
        """Whether both defaults say the same: null and 0 both turn a term off, false and `none` a switch."""
        if self.ours == self.theirs or (self.theirs is None and self.ours == 0):
            return True
        written = SAID_OTHERWISE.get(self.ours) if isinstance(self.ours, str | tuple) else None
        return written is not None and written == self.theirs


def kept_defaults() -> dict[str, Any]:
    """{"versions": {algorithm: TRL's release}, "fields": {algorithm: {name: default}}}, as committed."""
    return json.loads(KEPT.read_text(encoding="utf-8"))


def shared(defaults: Mapping[str, Any]) -> Iterator[Shared]:
    """Every field that has TRL's name, in the order of our configurations."""
    for name, theirs in defaults["fields"].items():
        for field, its in _fields_of(name):
            named = RENAMED.get(field, (field.rpartition(".")[2],))
            if all(each in theirs for each in named):
                own = "required" if its.is_required() else its.get_default()
                defaults_there = [theirs[each] for each in named]
                yield Shared(field, name, own, defaults_there[0] if len(named) == 1 else defaults_there)


def _fields_of(name: str) -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name -> field, of an algorithm's own fields and of its sections that have TRL's names."""
    fields = {} if name == "lora" else algorithm(name).config.model_fields
    yield from fields.items()
    for section, model in SECTIONS.items():
        if section == name or (section in fields and section != "lora"):
            for field, its in model.model_fields.items():
                yield f"{section}.{field}", its


def table(defaults: Mapping[str, Any]) -> str:
    """What differs, as markdown."""
    found = dict[str, list[Shared]]()
    for one in shared(defaults):
        found.setdefault(one.field, []).append(one)
    newest = max(
        defaults["versions"].values(), key=lambda version: [int(part) for part in version.split(".")]
    )
    lines, same = ["| field | ours | TRL's | why, or what it means |", "|---|---|---|---|"], list[str]()
    for field, ones in found.items():
        if not MEANING[field] and all(one.agrees for one in ones):
            same.append(f"`{field}`")
            continue
        ours, theirs = (_by_algorithm(ones, side) for side in ("ours", "theirs"))
        lines.append(
            f"| `{field}` | {ours} | {'the same' if all(one.agrees for one in ones) else theirs} | {MEANING[field]} |"
        )
    return (
        f"Fields that have TRL's name (release {newest}; PPO: {defaults['versions']['ppo']}, the last that has it) "
        f"and another default or meaning:\n\n" + "\n".join(lines) + "\n\n"
        f"The same in name, meaning and default: {', '.join(same)}.\n"
    )


def _by_algorithm(ones: list[Shared], side: str) -> str:
    """One default where all algorithms have the same, else each with its algorithms."""
    by_value = dict[str, list[str]]()
    for one in ones:
        by_value.setdefault(_written(getattr(one, side)), []).append(one.algorithm)
    if len(by_value) == 1:
        return next(iter(by_value))
    return ", ".join(
        f"{value} ({', '.join(f'`{name}`' for name in names)})" for value, names in by_value.items()
    )


def _written(value: Any) -> str:
    if value == "required":
        return value
    if isinstance(value, float) and value:
        return f"{value:g}"
    return json.dumps(list(value) if isinstance(value, tuple) else value).replace('"', "")


def read(python: str) -> dict[str, Any]:
    """{"version", "fields"} of the TRL that a Python has."""
    ran = subprocess.run([python, str(READER)], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--python", action="append", default=[], metavar="PATH")
    kept = kept_defaults()
    for python in parser.parse_args().python:
        found = read(python)
        for name, fields in found["fields"].items():
            if (name == "ppo") == (found["version"] == LAST_WITH_PPO):
                kept["versions"][name], kept["fields"][name] = found["version"], fields
    lines = [f"  {json.dumps(name)}: {json.dumps(kept['fields'][name])}" for name in sorted(kept["fields"])]
    KEPT.write_text(
        f'{{"versions": {json.dumps(kept["versions"], sort_keys=True)},\n "fields": {{\n'
        + ",\n".join(lines)
        + "\n}}\n",
        encoding="utf-8",
    )
    print(table(kept))


if __name__ == "__main__":
    main()
