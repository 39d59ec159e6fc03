"""Reads YAML and JSON files. Every fault in them becomes an error of one sentence; that of an unknown or missing key
says what to write instead. Torch-free."""

import difflib
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, Place, one_line, read_bytes, reading, shown

T = TypeVar("T")

MAX_ALIASES = 24  # in a YAML file: aliases of aliases then make at most 3 ** 8 copies of a value
MAX_DEPTH = 64  # nesting of lists and mappings in a YAML file
MAX_KEYS = 20_000  # of one YAML mapping: a measured distribution of lengths has a key for each length
MOST_YAML_BYTES = 1 << 20  # takes about 10 s to parse
MOST_PLAN_BYTES = 8 << 20  # of a plan in YAML: with 100,000 devices, each call lists them all
MOST_KEPT_BYTES = 1 << 30  # of JSON files that we wrote: a plan of 100,000 devices takes 50 MB
MOST_FAULTS = 12  # of a file that are told at once

_TYPES = ("null", "bool", "int", "float", "str", "seq", "map")
"""The YAML types that are known: those of JSON. A date stays text, because no setting is a date."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader with limits: it also refuses duplicate keys, deep nesting and many aliases.

    A few lines of aliases of aliases can expand to more values than any memory holds.
    """

    def __init__(self, text: str, place: Place) -> None:
        super().__init__(text)
        self._place, self._aliases, self._depth = place, 0, 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._place.line = self.peek_event().start_mark.line + 1
        self._aliases += self.check_event(yaml.AliasEvent)
        if self._aliases > MAX_ALIASES:
            raise yaml.YAMLError(f"more than {MAX_ALIASES} aliases")
        if isinstance(parent, yaml.MappingNode) and len(parent.value) == MAX_KEYS:
            raise yaml.YAMLError(f"more than {MAX_KEYS} keys in one mapping")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and node.end_mark is None:
            raise yaml.YAMLError("an alias refers to a value that contains it")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        self._place.line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # raises for an escaped lone surrogate
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set[Hashable]()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            self._place.line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise yaml.YAMLError("a key is a list or mapping")
            if key == "<<":
                raise yaml.YAMLError("no key may be '<<': write out what it would merge")
            if key in seen:
                raise yaml.YAMLError(f"key {shown(key)} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


_TAGS = [f"tag:yaml.org,2002:{name}" for name in _TYPES]
_Loader.yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in [*_TAGS, None]}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 reads 80e9, which has no decimal point and no sign in the exponent, as text
_Loader.add_implicit_resolver(
    _TAGS[3], re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, place: Place) -> Any:
    """The value of a YAML text. Call it inside `reading`; `place` is set to the line being parsed."""
    loader = _Loader(text, place)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_yaml(path: Path, most_bytes: int = MOST_YAML_BYTES) -> dict[str, Any]:
    """The mapping in a YAML file of at most `most_bytes` bytes. Raises ConfigError naming file and line."""
    with reading(path, "not valid YAML") as place:
        document = parse_yaml(read_bytes(path, most_bytes).decode("utf-8-sig"), place)
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {type(document).__name__}.")
    return document


def read_document(
    path: Path,
    kind: TypeAdapter[T],
    predicate: str,
    error: type[ValueError] = ConfigError,
    remedy: str = "",
) -> T:
    """The value in a JSON file that we wrote. Raises `error` with one sentence that names file, field and fault."""
    with reading(path, predicate, error, remedy):
        content = read_bytes(path, MOST_KEPT_BYTES)
        try:
            return kind.validate_json(content)
        except ValidationError as fault:
            raise error(f"{path}: {predicate}: {first_fault(fault)} {remedy}".rstrip()) from None


def first_fault(error: ValidationError) -> str:
    """One sentence for the first of pydantic's errors, in a file that we wrote."""
    return _sentence(error.errors(include_url=False)[0], None, ())


def faults_of(error: ValidationError, model: type[BaseModel] | None = None, *kinds: str) -> str:
    """A line for each of pydantic's errors in what a user wrote, with one sentence.

    model  what was validated; its keys are suggested for an unknown one
    kinds  the model's tag, where it is a member of a discriminated union, and those of such members of it
    """
    faults = error.errors(include_url=False)
    above = {fault["loc"][:end] for fault in faults for end in range(len(fault["loc"]))}
    # What is wrong above another fault only follows from it, such as a list without its refused item.
    own = [fault for fault in faults if fault["loc"] not in above] or faults
    found = dict.fromkeys(_sentence(fault, model, kinds) for fault in own)
    lines = list(found)[:MOST_FAULTS]
    return "\n".join(
        [*lines, *([f"There are {len(found) - len(lines)} more."] if len(found) > len(lines) else [])]
    )


def _sentence(fault: ErrorDetails, model: type[BaseModel] | None, kinds: Sequence[str]) -> str:
    *above, last = ("", *fault["loc"])
    tags = (*kinds, "path", "inline", "several")
    keyed = fault["type"] in (
        "extra_forbidden",
        "missing",
    )  # the last part is then a key, even if it is named like a tag
    path = [str(part) for part in above[1:] if part not in tags]
    path += [str(last)] if keyed or last not in tags else []
    field = one_line(".".join(path))
    message = one_line(fault["msg"].removeprefix("Value error, "), most=2000)
    match fault["type"]:
        case "extra_forbidden":
            return f"{field or repr('')}: unknown key{suggestion(path, model, fault['input'])}"
        case "missing":
            return f"{field}: required, but not given.{example(path, model)}"
        case "value_error":
            return f"{field}: {message}." if field else f"{message}."
    return f"{field}: {message[0].lower()}{message[1:]}, found {shown(fault['input'])}."


MOST_KEY = 100  # characters of a key that is compared with others: longer ones are no slips of the keyboard
MOST_LISTED = 12  # keys that a sentence lists
LAST = ("evaluation.", "planning.")  # sections that are meant less often than others
DEEPEST = 2  # sections inside sections, such as rewards.0

ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    # TRL and transformers
    **dict.fromkeys(("model", "model_path", "model_name_or_path", "sft_model_path"), ("models.actor",)),
    **dict.fromkeys(("ref_model", "ref_model_path"), ("models.ref",)),
    **dict.fromkeys(("reward_model_path", "reward_model_name_or_path"), ("models.reward",)),
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path"), ("models.teacher",)),
    **dict.fromkeys(("value_model", "value_model_path", "critic_model"), ("models.critic",)),
    **dict.fromkeys(("reward_funcs", "reward_function", "reward_fn", "custom_reward_function"), ("rewards",)),
    "reward_weights": ("rewards.0.weight",),
    **dict.fromkeys(("train_dataset", "dataset", "dataset_name", "train_files", "prompts"), ("data.train",)),
    **dict.fromkeys(("eval_dataset", "val_files", "eval_files"), ("evaluation.data",)),
    **dict.fromkeys(("max_prompt_length", "max_length", "max_seq_length"), ("data.max_prompt_tokens",)),
    **dict.fromkeys(
        ("max_new_tokens", "max_tokens", "response_length", "max_response_length"),
        ("sampling.max_completion_length",),
    ),
    "num_train_epochs": ("total_iterations",),
    **dict.fromkeys(("max_steps", "total_episodes", "total_epochs"), ("total_iterations",)),
    "total_training_steps": ("total_iterations",),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), ("batch_size",)),
    "generation_batch_size": ("batch_size",),
    **dict.fromkeys(("gradient_accumulation_steps", "micro_batch_size"), ("micro_batch_tokens",)),
    **dict.fromkeys(("steps_per_generation", "mini_batch_size"), ("num_mini_batches",)),
    **dict.fromkeys(("logging_steps", "log_with"), ("report_to",)),
    **dict.fromkeys(("save_steps", "save_freq", "save_strategy"), ("snapshot_every",)),
    "save_total_limit": ("keep_last",),
    **dict.fromkeys(("eval_steps", "eval_strategy", "test_freq"), ("evaluation.every",)),
    "eval_on_start": ("evaluation.on_start",),
    "load_best_model_at_end": ("evaluation.keep_best",),
    "num_generations_eval": ("evaluation.num_generations",),
    "resume_from_checkpoint": ("resume",),
    **dict.fromkeys(("run_name", "experiment_name", "project_name"), ("name",)),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "mixed_precision"), ("dtype",)),
    **dict.fromkeys(("lr", "lr_scheduler"), ("optimizer.learning_rate",)),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_steps"), ("optimizer.warmup_steps",)),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "betas"), ("optimizer.adam_betas",)),
    **dict.fromkeys(("grad_clip", "clip_grad"), ("optimizer.max_grad_norm",)),
    **dict.fromkeys(("stop_token", "stop_token_id"), ("sampling.stop",)),
    **dict.fromkeys(
        (
            "importance_cap",
            "importance_sampling_cap",
            "vllm_importance_sampling_cap",
            "vllm_importance_sampling_clip_max",
            "rollout_is_threshold",
        ),
        ("correction.upper",),
    ),
    "vllm_importance_sampling_clip_min": ("correction.lower",),
    **dict.fromkeys(("vllm_importance_sampling_correction", "rollout_correction"), ("correction",)),
    **dict.fromkeys(("vllm_importance_sampling_mode", "rollout_rs"), ("correction.kind",)),
    "rollout_is": ("correction.level",),
    "rollout_token_veto_threshold": ("correction.veto",),
    "vf_coef": ("critic_learning_rate",),
    # names of before
    "critic_optimizer": ("critic_learning_rate",),
    "evaluation.rewards": ("rewards.0.used_in",),
    "turn_timeout_s": ("reward_timeout_s",),
    **dict.fromkeys(("stop_strings", "stop_token_ids"), ("sampling.stop",)),
    # peft
    **dict.fromkeys(("peft_config", "use_peft", "lora_config"), ("lora",)),
    **dict.fromkeys(("lora.r", "lora_r", "lora_rank"), ("lora.rank",)),
    "lora_alpha": ("lora.alpha",),
    **dict.fromkeys(("target_modules", "lora_target_modules"), ("lora.targets",)),
    # verl
    **dict.fromkeys(("n", "group_size", "num_return_sequences"), ("num_generations",)),
    "ppo_mini_batch_size": ("num_mini_batches",),
    "ppo_epochs": ("num_ppo_epochs", "num_iterations"),
    "num_ppo_epochs": ("num_iterations",),
    "num_iterations": ("num_ppo_epochs",),
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_range"), ("cliprange", "epsilon")),
    "epsilon": ("cliprange",),
    "cliprange": ("epsilon",),
    "clip_ratio_high": ("epsilon_high",),
    "clip_ratio_c": ("dual_clip", "delta"),
    **dict.fromkeys(("kl_loss_coef", "init_kl_coef"), ("kl_coef", "beta")),
    "kl_coef": ("beta",),
    "beta": ("kl_coef",),
    "kl_penalty": ("kl_estimator",),
    "n_gpus_per_node": ("cluster.devices_per_host",),
    "nnodes": ("cluster.n_hosts",),
}
"""What TRL, transformers, peft, verl and earlier versions call it -> its names here; the first there is counts."""

SWITCHED_OFF = dict.fromkeys(("correction", "correction.upper"), "correction.kind: none")
"""A name of these -> what to write where the other one was given null or false."""

GONE: Mapping[str, str] = {
    **dict.fromkeys(
        ("subset", "split", "dataset_config", "dataset_train_split", "dataset_test_split"),
        "write subset and split behind the data set's name, as in data.train: openai/gsm8k:main:train",
    ),
    "retries": "a request that fails is sent three times more, but not one that has had its time",
    "request_timeout_s": "a request may take half of reward_timeout_s",
    "evaluation.batch_size": "an evaluation answers at most 64 rows at once",
    "max_observation_tokens": "an observation may fill what is left of sampling.max_completion_length",
    "score_clip": "whole scores are not clipped; reward_model.clip bounds the reward model's part",
    "snapshot_max_s": "write the seconds as snapshot_every, e.g. snapshot_every: 600s",
    **dict.fromkeys(
        ("deadline_floor_s", "deadline_factor", "io_floor_s", "io_least_bytes_per_s", "startup_timeout_s"),
        "patience is a factor of this and other waits, e.g. 2 for twice as long",
    ),
    "runtime": "patience and max_restarts are keys of the configuration itself, e.g. patience: 2",
    "max_rounds": "write the rounds as filter_groups, e.g. filter_groups: 2",
    "replan": "plan: adaptive is what plan: auto with replan: auto was",
    "value_huber_delta": "the error of a value is squared, clipped by cliprange_value",
}
"""Keys of earlier versions that have no other name here -> what holds instead."""

_EXAMPLES: Mapping[str, str] = {
    "actor": "models/my-model",
    "teacher": "models/my-teacher",
    "train": "data/train.jsonl",
    "data": "data/held_out.jsonl",  # of an evaluation; the section of this name has keys of its own
    "max_completion_length": "256",
    "total_iterations": "100",
    "function": "rewards.py:correct",
    "name": "mine",
    "stages": "[{name: sft, type: sft}]",
}
"""A required key -> a value to write for it."""


def suggestion(path: Sequence[str], model: type[BaseModel] | None, value: Any = ...) -> str:
    """The end of the sentence about an unknown key: its name here, the most similar key, or all.

    value  that it was given, where it matters: what is switched off elsewhere may have another key here
    """
    known = list(dict.fromkeys(name for m in _models_at(path[:-1], model) for name in m.model_fields))
    if not known:
        return "."
    key = path[-1][:MOST_KEY]
    everywhere = {} if model is None else _paths(model)
    if (instead := GONE.get(".".join(path), GONE.get(key))) is not None:
        return f": {instead}."
    candidates = (
        *ELSEWHERE.get(".".join(path), ()),
        *(known_there for known_there in everywhere if known_there.rpartition(".")[2] == key),
        *ELSEWHERE.get(key, ()),
    )
    here = [found for found in candidates if found.replace(".0.", ".") in everywhere]
    if here and value in (None, False) and here[0] in SWITCHED_OFF:
        return f": here it is {SWITCHED_OFF[here[0]]}."
    if here:
        return f": here it is {here[0]}."
    last = {found.rpartition(".")[2]: found for found in reversed(everywhere)}
    near = (
        difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        or [last[name] for name in difflib.get_close_matches(key, last, n=1, cutoff=0.8)]
        or difflib.get_close_matches(key, known, n=1)
    )
    if near:
        return f", did you mean {near[0]!r}?"
    listed = ", ".join(known) if len(known) <= MOST_LISTED else "see prefect-rlhf config schema NAME"
    return f" (known here: {listed})."


def example(path: Sequence[str], model: type[BaseModel] | None) -> str:
    """A sentence with what to write for a required key that is missing; "" where no example is known."""
    if any(part.isdecimal() for part in path):
        return ""
    (*above, key), models = path, _models_at(path[:-1], model)
    fields = [m.model_fields[key] for m in models if key in m.model_fields]
    written = _written(key, fields[0]) if fields else ""
    for section in reversed(above):
        written = written and f"{section}: {{{written}}}"
    return written and f" Write, for example, `{written}`."


def _written(key: str, field: FieldInfo) -> str:
    """`key: value` for a required field, with the required keys of a section; "" where no example is known."""
    sections = [] if isinstance(field.annotation, type) is False else _submodels(field.annotation)
    if not sections:
        return f"{key}: {_EXAMPLES[key]}" if key in _EXAMPLES else ""
    inner = [_written(name, its) for name, its in sections[0].model_fields.items() if its.is_required()]
    return f"{key}: {{{', '.join(inner)}}}" if all(inner) else ""


def _models_at(path: Sequence[str], model: type[BaseModel] | None) -> list[type[BaseModel]]:
    """The models that a section may have, by the keys that lead to it."""
    models = [] if model is None else [model]
    for key in path:
        fields = [m.model_fields[key] for m in models if key in m.model_fields]
        if fields or not key.isdecimal():
            models = [found for field in fields for found in _submodels(field.annotation)]
    return models


def _paths(model: type[BaseModel], depth: int = 0) -> dict[str, FieldInfo]:
    """The dotted name of every key of a configuration and its sections, the uppermost first."""
    found = dict(model.model_fields)
    if depth < DEEPEST:
        for name, field in model.model_fields.items():
            for section in _submodels(field.annotation):
                found |= {f"{name}.{key}": its for key, its in _paths(section, depth + 1).items()}
    return dict(sorted(found.items(), key=lambda item: (item[0].startswith(LAST), item[0].count("."))))


def _submodels(annotation: object) -> list[type[BaseModel]]:
    """The models inside `Model`, `Model | None`, `tuple[Model, ...]` or a tagged union of models."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _submodels(part)]
