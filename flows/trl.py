"""Trainers with TRL's names: a script written for TRL changes its imports and the name of its arguments.

    from prefect_rlhf import GRPOTrainer, TrainingArguments

    trainer = GRPOTrainer(model=..., reward_funcs=..., args=TrainingArguments(...), train_dataset=...)
    trainer.train()

A trainer translates what it is given into a configuration, `trainer.config`, and calls `train`. What is not given has
TRL's default. A name that has no counterpart here is refused with what comes closest.
"""

import dataclasses
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from prefect_rlhf.flows.train import TrainResult, train
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig, make_config
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.config.base import MOST_OF_A_NAME, RUN_NAME
from prefect_rlhf.rlhf_tasks.config.data import DataConfig
from prefect_rlhf.rlhf_tasks.config.files import suggestion
from prefect_rlhf.rlhf_tasks.config.models import OptimizerConfig
from prefect_rlhf.rlhf_tasks.config.responses import SamplingConfig
from prefect_rlhf.rlhf_tasks.data.dataset import data_set
from prefect_rlhf.rlhf_tasks.system.reading import shown

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"learning_rate": 1e-6, "max_completion_length": 512, "loss_type": "dapo"},
    "sft": {"learning_rate": 2e-5},
    "dpo": {"learning_rate": 1e-6},
}
"""TRL's defaults (1.16) that differ from ours and that results depend on; those of all trainers are below."""
OF_ALL = {
    **{"seed": 42, "lr_scheduler_type": "linear", "adam_beta1": 0.9, "adam_beta2": 0.999},
    **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0},
}
WITHOUT_EFFECT = (
    *(
        "logging_steps",
        "logging_strategy",
        "logging_first_step",
        "log_level",
        "disable_tqdm",
        "log_completions",
    ),
    *(
        "num_completions_to_print",
        "save_strategy",
        "remove_unused_columns",
        "shuffle_dataset",
        "dataset_num_proc",
    ),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataset_text_field", "eval_strategy"),
)
"""Names that choose what TRL prints and when it saves, or how it loads data. Every iteration is shown here."""
FALSE_ONLY = ("use_vllm", "fp16", "packing", "push_to_hub", "use_liger_kernel", "load_best_model_at_end")
"""Names that are taken where they ask for nothing."""
OF_PEFT = (
    *("r", "lora_alpha", "target_modules"),
    *("task_type", "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config", "megatron_core", "layers_pattern", "qalora_group_size"),
)
"""The fields of peft's LoraConfig that are translated, and those without effect where no other is set."""


class TrainingArguments:
    """TRL's training arguments by their names there, for any of the trainers.

    output_dir  the run's folder; default: a new one in `runs`
    A batch is `per_device_train_batch_size` times `gradient_accumulation_steps`, on however many devices.
    """

    def __init__(self, output_dir: str | Path | None = None, **names: Any) -> None:
        self.output_dir, self.names = output_dir, names


class Trainer:
    """What the three trainers share.

    config  what the run is configured by
    """

    algorithm: ClassVar[str]

    def __init__(
        self,
        model: str | Path,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        _refuse_others(others)
        args = TrainingArguments() if args is None else args
        if not isinstance(args, TrainingArguments):
            raise ConfigError(f"args: give prefect_rlhf.TrainingArguments(...), found {shown(args)}.")
        _refuse_object("model", model, processing_class)
        train_dataset, eval_dataset = (
            _rows("train_dataset", train_dataset),
            _rows("eval_dataset", eval_dataset),
        )
        names = {**OF_ALL, **DEFAULTS[self.algorithm], **args.names}
        document: dict[str, Any] = {"type": self.algorithm, "models": {"actor": str(model)}}
        document |= _place(args.output_dir) | _lora(peft_config) | self._special(names)
        document["data"] = {"train": train_dataset, "on_bad_row": "skip"}
        if (longest := names.pop("max_prompt_length", names.pop("max_length", None))) is not None:
            document["data"]["max_prompt_tokens"] = longest
        document |= self._size(names, train_dataset)
        if eval_dataset is not None:
            document["evaluation"] = self._evaluation(eval_dataset, names.pop("eval_steps", None))
        self._translate(names, document)
        self.config: RunConfig = make_config(document)
        self.result: TrainResult | None = None

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainResult:
        """Train to the end. resume_from_checkpoint: a run's folder, or True for that of `output_dir`

        Raises what `prefect_rlhf.train` does.
        """
        resume = resume_from_checkpoint or None
        if resume is True:
            resume = Path(self.config.output_dir, self.config.name or "")
        self.result = train(self.config, resume=resume)
        return self.result

    def save_model(self, output_dir: str | Path) -> None:
        """Copy the trained model into a folder, where it is not the run's own."""
        if self.result is None or self.result.model is None:
            raise ConfigError("there is no trained model yet. Call train() first.")
        if Path(output_dir).resolve() != self.result.folder:
            shutil.copytree(self.result.model, output_dir, dirs_exist_ok=True)

    def _special(self, names: dict[str, Any]) -> dict[str, Any]:
        """What only this trainer has, taken out of the names."""
        return {}

    def _samples_of_a_row(self, names: Mapping[str, Any]) -> int:
        return 1

    def _size(self, names: dict[str, Any], rows: Any) -> dict[str, Any]:
        """`batch_size` and `total_iterations`."""
        batch = math.prod(
            _number(each, names.pop(each))
            for each in ("per_device_train_batch_size", "gradient_accumulation_steps")
        )
        epochs = _number("num_train_epochs", names.pop("num_train_epochs"), float)
        steps = _number("max_steps", names.pop("max_steps", -1), least=-1)
        if steps <= 0:
            steps = math.ceil(epochs * _count(rows) * self._samples_of_a_row(names) / batch)
        else:  # each pass over an iteration's batch is a step there
            steps = math.ceil(steps / _number("num_iterations", names.get("num_iterations", 1)))
        return {"batch_size": batch, "total_iterations": max(steps, 1)}

    def _evaluation(self, rows: Any, every: int | None) -> dict[str, Any]:
        return {"data": rows, "loss": True, **({} if every is None else {"every": every})}

    def _translate(self, names: dict[str, Any], document: dict[str, Any]) -> None:
        """Put what is left of the names into the document. Raises ConfigError for one that has no place there."""
        betas = (names.pop("adam_beta1"), names.pop("adam_beta2"))
        optimizer = document["optimizer"] = {"adam_betas": betas}
        config = algorithm(self.algorithm).config
        for name, value in names.items():
            if name in WITHOUT_EFFECT or (name in FALSE_ONLY and not value):
                continue
            if name == "bf16":
                document["dtype"] = "bfloat16" if value else "float32"
            elif name == "save_steps":
                document["snapshot_every"] = value
            elif name == "save_total_limit":
                document["keep_last"] = max(_number(name, value or 2), 2)
            elif name == "report_to":
                document["report_to"] = [each for each in _listed(value) if each not in ("none", "all")]
            elif name == "run_name":
                continue
            elif name in OptimizerConfig.model_fields:
                optimizer[name] = value
            elif name in SamplingConfig.model_fields and "sampling" in config.model_fields:
                document.setdefault("sampling", {})[name] = value
            elif name in config.model_fields and name not in document:
                document[name] = value
            else:
                raise ConfigError(f"{name}: no setting of that name here{suggestion([name], config)}")


class GRPOTrainer(Trainer):
    """Group-relative policy optimisation (docs/algorithms.md), by TRL's names.

    reward_funcs  a function, several, or the folder of a reward model
    rollout_func  plays an episode for each response (docs/how-to/agents.md)
    """

    algorithm = "grpo"

    def __init__(
        self,
        model: str | Path,
        reward_funcs: Callable[..., Any] | str | Path | Sequence[Callable[..., Any] | str | Path],
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        rollout_func: Callable[..., Any] | None = None,
        **others: Any,
    ) -> None:
        self._agent = {} if rollout_func is None else {"agent": {"command": rollout_func}}
        self._rewards = [str(each) if isinstance(each, Path) else each for each in _listed(reward_funcs)]
        super().__init__(model, args, train_dataset, **others)
        models = [each for each in self._rewards if isinstance(each, str)]
        if models:
            paths = self.config.models.model_copy(update={"reward": models[0]})
            self.config = self.config.model_copy(update={"models": paths})

    def _special(self, names: dict[str, Any]) -> dict[str, Any]:
        functions = [each for each in self._rewards if not isinstance(each, str)]
        models = len(self._rewards) - len(functions)
        if models > 1:
            raise ConfigError(f"reward_funcs names {models} reward models. Name one of them.")
        weights = _listed(names.pop("reward_weights", None) or [1.0] * len(self._rewards))
        if len(weights) != len(self._rewards):
            raise ConfigError(
                f"reward_weights has {len(weights)} numbers for {len(self._rewards)} rewards. Give one for each."
            )
        pairs = list(zip(self._rewards, weights, strict=True))
        rewards = [{"function": each, "weight": w} for each, w in pairs if not isinstance(each, str)]
        of_model = [{"weight": weight} for each, weight in pairs if isinstance(each, str)]
        return {"rewards": rewards, **self._agent, **({"reward_model": of_model[0]} if of_model else {})}

    def _samples_of_a_row(self, names: Mapping[str, Any]) -> int:
        return _number("num_generations", names.get("num_generations", 8))

    def _evaluation(self, rows: Any, every: int | None) -> dict[str, Any]:
        return {**super()._evaluation(rows, every), "loss": False}


class SFTTrainer(Trainer):
    """Supervised fine-tuning by TRL's names."""

    algorithm = "sft"

    def _size(self, names: dict[str, Any], rows: Any) -> dict[str, Any]:
        if names.get("completion_only_loss") is None:
            # TRL then learns all of a conversation, and the completion alone where rows have one.
            names["completion_only_loss"] = "messages" not in _columns(rows)
        return super()._size(names, rows)


class DPOTrainer(Trainer):
    """Direct preference optimisation by TRL's names. ref_model: folder of the reference; default: the model"""

    algorithm = "dpo"

    def __init__(
        self,
        model: str | Path,
        ref_model: str | Path | None = None,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        **others: Any,
    ) -> None:
        if ref_model is not None:
            _refuse_object("ref_model", ref_model, None)
        super().__init__(model, args, train_dataset, **others)
        if ref_model is not None:
            paths = self.config.models.model_copy(update={"ref": str(ref_model)})
            self.config = self.config.model_copy(update={"models": paths})

    def _special(self, names: dict[str, Any]) -> dict[str, Any]:
        losses = _listed(names.pop("loss_type", "sigmoid"))
        if len(losses) > 1:
            raise ConfigError(f"loss_type: {', '.join(losses)} are several losses. Name one.")
        return {"loss_type": losses[0]}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _refuse_others(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                f"{name}: a trainer of this project has no such argument. It takes model, args, train_dataset, "
                "eval_dataset, processing_class and peft_config; for more, call train(GRPOConfig(...))."
            )


def _refuse_object(name: str, model: Any, processing_class: Any) -> None:
    """Raises ConfigError for a model that is no folder, and for another tokenizer than its own."""
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"{name}: every rank reads its part of the weights, so give the model's folder or id, found a "
            f"{type(model).__name__}."
        )
    source = getattr(processing_class, "name_or_path", None)
    if processing_class is not None and source not in (str(model), ""):
        raise ConfigError(
            f"processing_class: the tokenizer of a run is that of its model, {model}, found that of {source}. Leave "
            "it out."
        )


def _number(name: str, value: Any, kind: type = int, least: int = 1) -> Any:
    """A number of the training arguments. Raises ConfigError for what is none."""
    if kind is int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}: expected a whole number of at least {least}, found {shown(value)}.")
    elif not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"{name}: expected a number above 0, found {shown(value)}.")
    return value


def _rows(name: str, rows: Any) -> Any:
    """Rows, or the path of a data set as a text. Raises ConfigError for what can be read once alone."""
    if rows is not None and not isinstance(rows, str | Path) and not hasattr(rows, "__len__"):
        raise ConfigError(
            f"{name}: rows are counted and read again, which a {type(rows).__name__} does not allow. Give "
            "list(...) of them, a data set or a path."
        )
    return str(rows) if isinstance(rows, Path) else rows


def _place(output_dir: str | Path | None) -> dict[str, Any]:
    if output_dir is None:
        return {}
    folder = Path(output_dir).expanduser() if isinstance(output_dir, str | Path) else None
    if folder is None or len(folder.name) > MOST_OF_A_NAME or not re.fullmatch(RUN_NAME, folder.name):
        raise ConfigError(
            f"output_dir: expected a folder whose name has letters, digits, '.', '_' and '-' alone, at most "
            f"{MOST_OF_A_NAME}, and begins with a letter or digit, found {shown(str(output_dir))}. "
            "It is the run's name."
        )
    return {"output_dir": str(folder.parent), "name": folder.name}


def _lora(peft_config: Any) -> dict[str, Any]:
    """`lora` from peft's LoraConfig, or what has its attributes."""
    if peft_config is None:
        return {}
    if not hasattr(peft_config, "r") or not hasattr(peft_config, "lora_alpha"):
        raise ConfigError(f"peft_config: expected peft's LoraConfig, found a {type(peft_config).__name__}.")
    if set_names := [f"{name}={shown(value)}" for name, value in _set_fields(peft_config)]:
        raise ConfigError(
            f"peft_config: {', '.join(set_names)}, and adapters here have r, lora_alpha and target_modules alone. "
            "Leave it out."
        )
    targets = getattr(peft_config, "target_modules", None)
    lora = {"rank": peft_config.r, "alpha": peft_config.lora_alpha}
    if targets is not None and targets != "all-linear":
        lora["targets"] = [targets] if isinstance(targets, str) else sorted(targets)
    return {"lora": lora}


def _set_fields(peft_config: Any) -> Iterator[tuple[str, Any]]:
    """The fields that ask for what adapters here have not: (name, value)."""
    fields = dataclasses.fields(peft_config) if dataclasses.is_dataclass(peft_config) else ()
    usual = {
        each.name: each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        for each in fields
    }
    for name, value in vars(peft_config).items():
        is_set = value != usual[name] if name in usual else bool(value)
        if is_set and name not in OF_PEFT:
            yield name, value


def _count(rows: Any) -> int:
    """The number of rows. Raises ConfigError where only reading a data set elsewhere would tell."""
    if rows is None:
        raise ConfigError("train_dataset: required, but not given. Give rows, a data set or a path.")
    if not isinstance(rows, str | Path):
        return len(rows)
    if not Path(rows).exists():
        raise ConfigError(
            f"train_dataset {rows} is no file here, so its rows cannot be counted. Give max_steps in place of epochs."
        )
    return sum(1 for _ in data_set(DataConfig(train=str(rows))))


def _columns(rows: Any) -> Iterable[str]:
    if isinstance(rows, str | Path):
        return next(iter(data_set(DataConfig(train=str(rows))))).row if Path(rows).exists() else ()
    return getattr(rows, "column_names", None) or (rows[0] if rows else ())
