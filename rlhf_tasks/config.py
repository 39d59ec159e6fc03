"""Run configuration: one YAML file, a discriminated union on `type` (ppo, sft, reward_model, rollout).

Torch-free and fast to import. Every configuration is frozen and refuses unknown keys; field names are those
that users of TRL know. `load_config` reads a file with overrides and turns every fault into one sentence.
"""

import difflib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

from rlhf_tasks.config_parts import (
    ActorOnly,
    Assignments,
    BaseConfig,
    ModelsConfig,
    OptimizerConfig,
    RewardFunction,
    RewardModelScore,
    Role,
    RolloutModels,
    SamplingConfig,
    TrainingConfig,
)
from rlhf_tasks.spec import CallAssignment, Frozen


class ConfigError(ValueError):
    """A configuration that cannot be used: one sentence naming the field, the value and what to change."""


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning on completion tokens."""

    type: Literal["sft"] = "sft"
    models: ActorOnly
    random_init: bool = Field(
        default=False, description="Start from random weights: models.actor needs only its configuration."
    )

    def roles(self) -> dict[str, Role]:
        """The one role that trains."""
        return {"actor": Role(self.models.actor, "lm", self.optimizer, self.random_init)}


class RewardModelConfig(TrainingConfig):
    """Reward model from preference pairs (Bradley-Terry)."""

    type: Literal["reward_model"] = "reward_model"
    models: ActorOnly
    center_rewards_coefficient: float = Field(
        default=1e-3, ge=0, description="Factor of the squared scores in the loss, which keeps them near 0."
    )

    def roles(self) -> dict[str, Role]:
        """The one role that trains: a decoder with a scalar head."""
        return {"reward": Role(self.models.actor, "scalar", self.optimizer)}


class RolloutConfig(BaseConfig):
    """Samples from a model, scored and written as JSONL: all rows once, in file order."""

    type: Literal["rollout"] = "rollout"
    models: RolloutModels
    sampling: SamplingConfig
    num_generations: int = Field(default=1, gt=0, description="Samples per prompt.")
    rewards: tuple[RewardFunction, ...] = Field(
        default=(), description="Python rewards, summed with weights."
    )
    reward_model: RewardModelScore = Field(
        default=RewardModelScore(), description="How the reward model's score enters."
    )
    missing_eos_penalty: float = Field(
        default=0.0, ge=0, description="Subtracted where a response has no end token."
    )
    reward_timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds that the Python rewards get per batch."
    )

    @property
    def scoring_role(self) -> str:
        """The role whose mesh scores: the reward model, or the actor where only functions score."""
        return "actor" if self.models.reward is None else "reward"

    def roles(self) -> dict[str, Role]:
        """The frozen roles."""
        roles = {"actor": Role(self.models.actor, "lm", None)}
        if self.models.reward is not None:
            roles["reward"] = Role(self.models.reward, "scalar", None)
        return roles

    @model_validator(mode="after")
    def _batch_holds_whole_prompts(self) -> Self:
        if self.batch_size % self.num_generations:
            raise ValueError(
                f"num_generations={self.num_generations} does not divide batch_size={self.batch_size}. "
                "Make batch_size a multiple of num_generations."
            )
        _refuse_equal_names(self.rewards)
        return self


class PPOConfig(TrainingConfig):
    """Proximal policy optimisation (arXiv:1707.06347) with a learned critic and a KL-shaped reward."""

    type: Literal["ppo"] = "ppo"
    models: ModelsConfig
    sampling: SamplingConfig
    rewards: tuple[RewardFunction, ...] = Field(
        default=(), description="Python rewards, summed with weights."
    )
    reward_model: RewardModelScore = Field(
        default=RewardModelScore(), description="How the reward model's score enters."
    )
    missing_eos_penalty: float = Field(
        default=0.0, ge=0, description="Subtracted where a response has no end token."
    )
    reward_timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds that the Python rewards get per batch."
    )
    score_clip: float | None = Field(default=None, gt=0, description="Bound of a score; default: none.")
    kl_coef: float = Field(
        default=0.05, ge=0, description="Factor of the KL penalty; its start when adaptive."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1", description="Estimator of the per-token KL divergence."
    )
    kl_target: float | None = Field(
        default=None, gt=0, description="KL per sequence that an adaptive kl_coef steers to; default: fixed."
    )
    kl_horizon: int = Field(
        default=10_000, gt=0, description="Sequences over which an adaptive kl_coef reacts."
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount per token.")
    lam: float = Field(default=0.95, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    whiten_advantages: bool = Field(
        default=True, description="Advantages to mean 0 and std 1 over the whole batch."
    )
    normalize_values: bool = Field(default=False, description="The critic learns normalised returns.")
    cliprange: float = Field(default=0.2, gt=0, description="Bound of the policy ratio's distance from 1.")
    cliprange_value: float = Field(
        default=0.2, gt=0, description="Bound of a value's change, in the units that the critic learns."
    )
    num_ppo_epochs: int = Field(default=1, gt=0, description="Passes over an iteration's batch.")
    early_stop_ratio: float | None = Field(
        default=None,
        gt=1,
        description="Mean ratio of a mini-batch above which the actor skips the rest of the iteration.",
    )
    critic_warmup_iterations: int = Field(
        default=0, ge=0, description="First iterations, in which only the critic trains."
    )
    critic_optimizer: OptimizerConfig | None = Field(
        default=None, description="The critic's optimizer; default: like the actor's."
    )

    @property
    def scoring_role(self) -> str:
        """The role whose mesh scores: the reward model, or the reference where only functions score."""
        return "ref" if self.models.reward is None else "reward"

    def roles(self) -> dict[str, Role]:
        """Actor, critic, ref, and reward where there is a reward model."""
        models = self.models
        critic = models.critic or models.reward or models.actor
        roles = {
            "actor": Role(models.actor, "lm", self.optimizer),
            "critic": Role(critic, "scalar", self.critic_optimizer or self.optimizer),
            "ref": Role(models.ref or models.actor, "lm", None),
        }
        if models.reward is not None:
            roles["reward"] = Role(models.reward, "scalar", None)
        return roles

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if not self.rewards and self.models.reward is None:
            raise ValueError(
                "nothing scores the responses. Name a function under rewards or a models.reward."
            )
        _refuse_equal_names(self.rewards)
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature=0 is greedy, and PPO must explore. Choose 1.0, for example."
            )
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            raise ValueError(
                f"sampling.top_p={self.sampling.top_p} and top_k={self.sampling.top_k} leave out tokens, whose "
                "probability under the trained policy then has no counterpart. Set top_p to 1 and top_k to 0."
            )
        if self.critic_warmup_iterations >= self.total_iterations:
            raise ValueError(
                f"critic_warmup_iterations={self.critic_warmup_iterations} leaves no iteration for the actor "
                f"(total_iterations={self.total_iterations}). Make it smaller."
            )
        return self


def _refuse_equal_names(rewards: Sequence[RewardFunction]) -> None:
    names = [reward.name for reward in rewards]
    if len(set(names)) != len(names):
        raise ValueError(f"two rewards share a name: {', '.join(names)}. Rename one of the functions.")


AnyConfig = PPOConfig | SFTConfig | RewardModelConfig | RolloutConfig
RunConfig = Annotated[AnyConfig, Field(discriminator="type")]
RUN_CONFIG: TypeAdapter[AnyConfig] = TypeAdapter(RunConfig)
ASSIGNMENTS: TypeAdapter[Assignments] = TypeAdapter(Assignments)
CONFIG_TYPES: dict[str, type[AnyConfig]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    "rollout": RolloutConfig,
}


def load_config(path: str | Path, overrides: Sequence[str] = (), base: Path | None = None) -> AnyConfig:
    """Read a run configuration from YAML, apply overrides and make its relative paths absolute.

    overrides  `key.sub=value`, the value being YAML; a number addresses a list: `rewards.0.weight=2`
    base       what relative paths mean; by default the current folder, as everywhere on a command line
    Raises ConfigError for a missing or malformed file and for every fault in a field.
    """
    document = _read_yaml(Path(path))
    for override in overrides:
        _apply_override(document, override)
    return resolve_paths(make_config(document), base or Path.cwd())


def make_config(document: Mapping[str, Any]) -> AnyConfig:
    """Validate a parsed configuration. Raises ConfigError with one sentence for the first fault."""
    try:
        return RUN_CONFIG.validate_python(dict(document))
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors(), document)) from None


def manual_assignments(config: AnyConfig) -> dict[str, CallAssignment] | None:
    """The plan given by hand (inline, or in the YAML file that `plan` names); None means the heuristic.

    Raises ConfigError when the file is missing or malformed.
    """
    plan = config.plan
    if plan == "heuristic":
        return None
    if isinstance(plan, str):
        document = _read_yaml(Path(plan))
        try:
            plan = ASSIGNMENTS.validate_python(document)
        except ValidationError as error:
            raise ConfigError(f"{config.plan}: {_sentence(error.errors(), document)}") from None
    return {call: manual.assignment() for call, manual in plan.items()}


def resolve_paths(config: AnyConfig, base: Path) -> AnyConfig:
    """The same with every relative path made absolute against `base`, as workers have other folders."""

    def absolute(path: str) -> str:
        return str(base / Path(path).expanduser())

    document = config.model_dump()
    document["output_dir"] = absolute(config.output_dir)
    document["data"]["train"] = absolute(config.data.train)
    document["models"] = {role: folder and absolute(folder) for role, folder in document["models"].items()}
    if config.resume not in ("never", "auto"):
        document["resume"] = absolute(config.resume)
    if isinstance(config.plan, str) and config.plan != "heuristic":
        document["plan"] = absolute(config.plan)
    for reward in document.get("rewards", ()):
        location, _, function = reward["function"].rpartition(":")
        if location.endswith(".py"):
            reward["function"] = f"{absolute(location)}:{function}"
    return RUN_CONFIG.validate_python(document)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark
                )
            seen.append(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's mapping. Raises ConfigError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a UTF-8 text file ({error}).") from None
    try:
        document = yaml.load(text, _UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}.") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {type(document).__name__}.")
    return document


def _apply_override(document: dict[str, Any], override: str) -> None:
    """Set one key of a parsed document in place; missing mappings on the way are made."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form key.sub=value.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: {text!r} is not a YAML value.") from None
    target: Any = document
    for position, key in enumerate(keys):
        where = ".".join(keys[:position])
        place: Any = int(key) if isinstance(target, list) and key.isdecimal() else key
        if isinstance(target, list) and (place == key or place >= len(target)):
            raise ConfigError(f"override {override!r}: {where} has no item {key!r}.")
        if not isinstance(target, dict | list):
            raise ConfigError(f"override {override!r}: {where} is a value, not a mapping.")
        if position == len(keys) - 1:
            target[place] = value
        elif isinstance(target, dict) and target.get(place) is None:
            target[place] = {}
        target = target[place]


def _sentence(errors: Sequence[ErrorDetails], document: Mapping[str, Any]) -> str:
    """One sentence for the first of pydantic's errors."""
    error = errors[0]
    kind = document.get("type")
    path = [str(part) for part in error["loc"] if part not in (kind, "inline", "path")]
    field = ".".join(path)
    message = error["msg"].removeprefix("Value error, ").rstrip(".")
    match error["type"]:
        case "union_tag_not_found" | "union_tag_invalid":
            return f"type: must be one of {', '.join(CONFIG_TYPES)}, found {kind!r}."
        case "extra_forbidden":
            return f"{field}: unknown key{_suggestion(path, kind)}"
        case "missing":
            return f"{field}: required, but not given."
        case "value_error":
            return f"{field}: {message}." if field else f"{message}."
    return f"{field}: {message[0].lower()}{message[1:]}, found {error['input']!r}."


def _suggestion(path: Sequence[str], kind: Any) -> str:
    """Ends the sentence about an unknown key: the key that is spelt alike, or else those there are."""
    model: Any = CONFIG_TYPES.get(str(kind))
    for key in path[:-1]:
        field = model.model_fields.get(key) if model else None
        model = _submodel(field.annotation) if field else model if key.isdecimal() else None
    if model is None:
        return "."
    near = difflib.get_close_matches(path[-1], model.model_fields, n=1)
    return f", did you mean {near[0]!r}?" if near else f" (known here: {', '.join(model.model_fields)})."


def _submodel(annotation: Any) -> type[Frozen] | None:
    """The configuration model inside `Model`, `Model | None` or `tuple[Model, ...]`."""
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Frozen)), None)
