"""Run configuration: one YAML file, a discriminated union on `type` (ppo, grpo, sft, reward_model, rollout).

Torch-free and fast to import. Every configuration is frozen and refuses unknown keys; field names are those
that users of TRL know. `load_config` reads a file with overrides and turns every fault into one sentence.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from rlhf_tasks.config.base import BaseConfig, TrainingConfig
from rlhf_tasks.config.files import MOST_PLAN_BYTES, first_fault, parse_yaml, read_yaml
from rlhf_tasks.config.sections import (
    MOST_ITERATIONS,
    MOST_SEQS,
    ActorOnly,
    Assignments,
    GRPOModels,
    ModelsConfig,
    OptimizerConfig,
    RewardFunction,
    Role,
    RolloutModels,
    SamplingConfig,
    ScoringConfig,
)
from rlhf_tasks.spec import CallAssignment
from rlhf_tasks.system.reading import ConfigError, reading, shown


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning on completion tokens."""

    type: Literal["sft"] = "sft"
    models: ActorOnly
    random_init: bool = Field(
        default=False, description="Start from random weights: models.actor needs only its configuration."
    )

    def roles(self) -> dict[str, Role]:
        """The one role that trains."""
        return {
            "actor": Role.of(self.models.actor, "lm", self.optimizer)._replace(random_init=self.random_init)
        }


class RewardModelConfig(TrainingConfig):
    """Reward model from preference pairs (Bradley-Terry)."""

    type: Literal["reward_model"] = "reward_model"
    models: ActorOnly
    center_rewards_coefficient: float = Field(
        default=1e-3, ge=0, description="Factor of the squared scores in the loss, which keeps them near 0."
    )

    def roles(self) -> dict[str, Role]:
        """The one role that trains: a decoder with a scalar head."""
        return {"reward": Role.of(self.models.actor, "scalar", self.optimizer)}


class RolloutConfig(ScoringConfig, BaseConfig):
    """Samples from a model, scored and written as JSONL: all rows once, in file order."""

    type: Literal["rollout"] = "rollout"
    models: RolloutModels
    sampling: SamplingConfig
    num_generations: int = Field(default=1, gt=0, le=MOST_SEQS, description="Samples per prompt.")

    @property
    def scoring_role(self) -> str:
        """The role whose mesh scores: the reward model, or the actor where only functions score."""
        return "actor" if self.models.reward is None else "reward"

    def roles(self) -> dict[str, Role]:
        """The frozen roles."""
        roles = {"actor": Role.of(self.models.actor, "lm")}
        if self.models.reward is not None:
            roles["reward"] = Role.of(self.models.reward, "scalar")
        return roles

    @model_validator(mode="after")
    def _batch_holds_whole_prompts(self) -> Self:
        _check_groups(self.num_generations, self.batch_size)
        _refuse_equal_names(self.rewards)
        return self


class PPOConfig(ScoringConfig, TrainingConfig):
    """Proximal policy optimisation (arXiv:1707.06347) with a learned critic and a KL-shaped reward."""

    type: Literal["ppo"] = "ppo"
    models: ModelsConfig
    sampling: SamplingConfig
    score_clip: float | None = Field(default=None, gt=0, description="Bound of a score; default: none.")
    truncated_responses: Literal["keep", "zero", "bootstrap"] = Field(
        default="keep",
        description="A response without end token keeps its score, gets 0, or also the value of what is to come.",
    )
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
        default=10_000, gt=0, le=10**12, description="Sequences over which an adaptive kl_coef reacts."
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
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="Ratio at which the loss of a token with a negative advantage stops growing; default: none.",
    )
    value_huber_delta: float | None = Field(
        default=None,
        gt=0,
        description="Value errors beyond it cost linearly (Huber loss); default: squared everywhere.",
    )
    num_ppo_epochs: int = Field(default=1, gt=0, le=1000, description="Passes over an iteration's batch.")
    early_stop_ratio: float | None = Field(
        default=None,
        gt=1,
        description="Mean ratio of a mini-batch above which the actor skips the rest of the iteration.",
    )
    critic_warmup_iterations: int = Field(
        default=0, ge=0, le=MOST_ITERATIONS, description="First iterations, in which only the critic trains."
    )
    critic_optimizer: OptimizerConfig | None = Field(
        default=None,
        description="The critic's optimizer, whose rate stands for TRL's vf_coef; default: like the actor's.",
    )

    @property
    def scoring_role(self) -> str:
        """The role whose mesh scores: the reward model, or the reference where only functions score."""
        return "ref" if self.models.reward is None else "reward"

    @property
    def records_kept(self) -> bool:
        """Whether samples carry what top-k and top-p kept: training must leave out the same tokens again."""
        return self.sampling.top_p < 1 or self.sampling.top_k > 0

    def roles(self) -> dict[str, Role]:
        """Actor, critic, ref, and reward where there is a reward model."""
        models = self.models
        critic = models.critic or models.reward or models.actor
        roles = {
            "actor": Role.of(models.actor, "lm", self.optimizer),
            "critic": Role.of(critic, "scalar", self.critic_optimizer or self.optimizer),
            "ref": Role.of(models.ref or models.actor, "lm"),
        }
        if models.reward is not None:
            roles["reward"] = Role.of(models.reward, "scalar")
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
        if self.critic_warmup_iterations >= self.total_iterations:
            raise ValueError(
                f"critic_warmup_iterations={self.critic_warmup_iterations} leaves no iteration for the actor "
                f"(total_iterations={self.total_iterations}). Make it smaller."
            )
        return self


class GRPOConfig(TrainingConfig):
    """Group-relative policy optimisation (arXiv:2402.03300): what its graph and its plan depend on."""

    type: Literal["grpo"] = "grpo"
    models: GRPOModels
    sampling: SamplingConfig
    rewards: tuple[RewardFunction, ...] = Field(
        default=(), description="Python rewards, summed with weights."
    )
    num_generations: int = Field(
        default=8, gt=1, le=MOST_SEQS, description="Samples per prompt, which form a group."
    )

    @property
    def scoring_role(self) -> str:
        """The role whose mesh scores: the reward model, or the reference where only functions score."""
        return "ref" if self.models.reward is None else "reward"

    def roles(self) -> dict[str, Role]:
        """Actor, ref, and reward where there is a reward model."""
        models = self.models
        roles = {
            "actor": Role.of(models.actor, "lm", self.optimizer),
            "ref": Role.of(models.ref or models.actor, "lm"),
        }
        if models.reward is not None:
            roles["reward"] = Role.of(models.reward, "scalar")
        return roles

    @model_validator(mode="after")
    def _batch_holds_whole_groups(self) -> Self:
        _check_groups(self.num_generations, self.batch_size)
        return self


def _check_groups(num_generations: int, batch_size: int) -> None:
    if batch_size % num_generations:
        raise ValueError(
            f"num_generations={num_generations} does not divide batch_size={batch_size}. "
            "Make batch_size a multiple of num_generations."
        )


def _refuse_equal_names(rewards: Sequence[RewardFunction]) -> None:
    names = [reward.name for reward in rewards]
    if len(set(names)) != len(names):
        raise ValueError(f"two rewards share a name: {', '.join(names)}. Rename one of the functions.")


AnyConfig = PPOConfig | GRPOConfig | SFTConfig | RewardModelConfig | RolloutConfig
RunConfig = Annotated[AnyConfig, Field(discriminator="type")]
RUN_CONFIG: TypeAdapter[AnyConfig] = TypeAdapter(RunConfig)
ASSIGNMENTS: TypeAdapter[Assignments] = TypeAdapter(Assignments)
CONFIG_TYPES: dict[str, type[AnyConfig]] = {
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    "rollout": RolloutConfig,
}
MADE_PLANS = ("heuristic", "auto")
"""What `plan` says where the plan is not given by hand."""

FIGURES = (".yaml", ".yml")
"""How a device ends that is a file with figures and no preset."""


def load_config(path: str | Path, overrides: Sequence[str] = (), base: Path | None = None) -> AnyConfig:
    """Read a run configuration from YAML, apply overrides and make its relative paths absolute.

    overrides  `key.sub=value`, the value being YAML; a number addresses a list: `rewards.0.weight=2`
    base       what relative paths mean; by default the current folder, as everywhere on a command line
    Raises ConfigError for a missing or malformed file and for every fault in a field.
    """
    document = read_yaml(Path(path))
    for change in overrides:
        _apply_override(document, change)
    return resolve_paths(make_config(document), base or Path.cwd())


def make_config(document: Mapping[str, Any]) -> AnyConfig:
    """Validate a parsed configuration. Raises ConfigError with one sentence for the first fault."""
    kind = document.get("type")
    if not isinstance(kind, str) or kind not in CONFIG_TYPES:
        raise ConfigError(f"type: must be one of {', '.join(CONFIG_TYPES)}, found {shown(kind)}.")
    try:
        return RUN_CONFIG.validate_python(dict(document))
    except ValidationError as error:
        raise ConfigError(first_fault(error, CONFIG_TYPES[kind], kind)) from None


def override(config: AnyConfig, overrides: Sequence[str]) -> AnyConfig:
    """A configuration with some keys changed, as `load_config` does it. Raises ConfigError."""
    document = config.model_dump(mode="json")
    for change in overrides:
        _apply_override(document, change)
    return make_config(document)


def manual_assignments(config: AnyConfig) -> dict[str, CallAssignment] | None:
    """The plan given by hand (inline, or in the YAML file that `plan` names); None: it has to be made.

    Raises ConfigError when the file is missing or malformed.
    """
    plan = config.plan
    if isinstance(plan, str):
        return None if plan in MADE_PLANS else read_assignments(Path(plan), config.cluster.devices_per_host)
    return {call: manual.assignment(config.cluster.devices_per_host) for call, manual in plan.items()}


def read_assignments(path: Path, devices_per_host: int) -> dict[str, CallAssignment]:
    """The assignments in a YAML file: {call: {devices or hosts, dp, tp, pp, ...}}.

    Raises ConfigError naming the file, and the call whose strategy does not fit its devices.
    """
    try:
        plan = ASSIGNMENTS.validate_python(read_yaml(path, MOST_PLAN_BYTES))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_fault(error)}") from None
    assignments = {}
    for call, manual in plan.items():
        try:
            assignments[call] = manual.assignment(devices_per_host)
        except ValueError as error:
            raise ConfigError(f"{path}: {call}: {error}") from None
    return assignments


def resolve_paths(config: AnyConfig, base: Path) -> AnyConfig:
    """The same with every relative path made absolute against `base`, as workers have other folders."""

    def absolute(path: str) -> str:
        with reading(path, "no path"):
            return str(base / Path(path).expanduser())

    document = config.model_dump()
    document["output_dir"] = absolute(config.output_dir)
    document["data"]["train"] = absolute(config.data.train)
    document["models"] = {
        role: absolute(source) if isinstance(source, str) else source
        for role, source in document["models"].items()
    }
    devices = document["planning"]["device"]
    for holder in [document["planning"]] if isinstance(devices, str) else devices or ():
        if holder["device"].endswith(FIGURES):
            holder["device"] = absolute(holder["device"])
    if config.resume not in ("never", "auto"):
        document["resume"] = absolute(config.resume)
    if isinstance(config.plan, str) and config.plan not in MADE_PLANS:
        document["plan"] = absolute(config.plan)
    for reward in document.get("rewards", ()):
        location, _, function = reward["function"].rpartition(":")
        if location.endswith(".py"):
            reward["function"] = f"{absolute(location)}:{function}"
    return RUN_CONFIG.validate_python(document)


def _apply_override(document: dict[str, Any], override: str) -> None:
    """Set one key of a parsed document in place; missing mappings on the way are made."""
    dotted, equals, text = override.partition("=")
    keys, what = dotted.strip().split("."), f"override {shown(override)}"
    if not equals or not all(keys):
        raise ConfigError(f"{what} is not of the form key.sub=value.")
    with reading(what, "not valid YAML") as place:
        value = parse_yaml(text, place)
    target: Any = document
    for position, key in enumerate(keys):
        where = ".".join(keys[:position])
        place: Any = int(key) if isinstance(target, list) and key.isdecimal() else key
        if isinstance(target, list) and (place == key or place >= len(target)):
            raise ConfigError(f"{what}: {where} has no item {key!r}.")
        if not isinstance(target, dict | list):
            raise ConfigError(f"{what}: {where} is a value, not a mapping.")
        if position == len(keys) - 1:
            target[place] = value
        elif isinstance(target, dict) and target.get(place) is None:
            target[place] = {}
        target = target[place]
