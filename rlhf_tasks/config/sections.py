"""The sections of run configurations: models, data, rewards, sampling, optimizer, cluster, plan.

Torch-free. Each field has bounds and a description, which `config schema` and the blocks show.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from rlhf_tasks.parallel.layout.shape import Lora, ModelShape, linear_modules
from rlhf_tasks.parallel.layout.topology import MAX_DEVICES, ParallelStrategy, Placement, check_count
from rlhf_tasks.spec import CallAssignment, Frozen

Head = Literal["lm", "scalar"]

# Upper bounds that no real run reaches. Larger numbers are typing errors, and some would fill the memory with lists.
MOST_SEQS = 2**20  # of a batch
MOST_TOKENS = 2**24  # of a sequence
MOST_ITERATIONS = 10**9
MOST_STOPS = 32  # strings, and ids, that end a response
MOST_STOP_BYTES = 256  # of all stop strings: the table that finds them has a row for each
MOST_RANK = 2**20  # of an adapter; no dimension of a model is larger
MOST_SECONDS = 1e9  # about thirty years; functions that wait accept no larger timeout


class Settings(Frozen):
    """Base of all configuration: immutable, unknown keys are refused, numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _empty_section_is_the_default(cls, values: Any) -> Any:
        """A section that is null, as an empty key in YAML or a closed one in a form is, takes its default."""
        if not isinstance(values, Mapping):
            return values
        return {
            key: value
            for key, value in values.items()
            if value is not None or not cls._has_default_section(key)
        }

    @classmethod
    def _has_default_section(cls, key: Any) -> bool:
        field = cls.model_fields.get(key)
        if field is None or field.is_required():
            return False
        return isinstance(field.annotation, type) and issubclass(field.annotation, Settings)


class InlineModel(Settings):
    """A model that is given by its configuration only, without weights: enough to plan with, not to run."""

    config: dict[str, Any] = Field(description="The content of a Hugging Face config.json, as a mapping.")


def _form(value: Any) -> str:
    return "path" if isinstance(value, str) else "inline"


ModelSource = Annotated[
    Annotated[str, Tag("path")] | Annotated[InlineModel, Tag("inline")], Discriminator(_form)
]


class ActorOnly(Settings):
    """Hugging Face folder of the one role of SFT and reward modelling. Planning also accepts `{config: {...}}`."""

    actor: ModelSource = Field(
        description="Folder the training starts from; its tokenizer serves the whole run."
    )

    @property
    def tokenizer(self) -> str:
        """The folder whose tokenizer serves the run. Raises ValueError where the actor has no folder."""
        if isinstance(self.actor, InlineModel):
            raise ValueError(
                "models.actor is an inline config, which has no tokenizer. Name a model folder; to plan without one, "
                "give planning.prompt_tokens."
            )
        return self.actor


class ReferenceModels(ActorOnly):
    """Hugging Face folders of an actor and its frozen reference."""

    ref: ModelSource | None = Field(
        default=None, description="Folder of the frozen reference; default: the actor."
    )


class DistillationModels(ActorOnly):
    """Hugging Face folders of a student, the actor, and its teacher."""

    teacher: ModelSource = Field(description="Folder of the frozen teacher, whose tokenizer is the actor's.")


class RolloutModels(ActorOnly):
    """Hugging Face folders of a rollout."""

    reward: ModelSource | None = Field(
        default=None, description="Folder of a reward model that also scores; default: none."
    )


class GRPOModels(ReferenceModels, RolloutModels):
    """Hugging Face folders of the roles of GRPO, which has no critic."""


class ModelsConfig(GRPOModels):
    """Hugging Face folders of the roles of PPO."""

    critic: ModelSource | None = Field(
        default=None,
        description="Folder the critic starts from; default: the reward model, or else the actor.",
    )


class DataSource(Settings):
    """One of several sources of rows."""

    path: str = Field(min_length=1, description="JSONL (.gz) or Parquet: a file, a glob or a folder.")
    weight: float = Field(
        default=1.0, gt=0, le=1e9, description="Its share of the samples, relative to the other sources'."
    )


def _form_of_data(value: Any) -> str:
    return "path" if isinstance(value, str) else "inline"


DataFiles = Annotated[
    Annotated[Annotated[str, Field(min_length=1)], Tag("path")]
    | Annotated[Annotated[tuple[DataSource, ...], Field(min_length=1, max_length=100)], Tag("inline")],
    Discriminator(_form_of_data),
]


class DataConfig(Settings):
    """Where the rows come from."""

    train: DataFiles = Field(
        description="JSONL (.gz) or Parquet: a file, a glob or a folder; or several: [{path, weight}].",
    )
    column_map: dict[str, str] = Field(
        default_factory=dict, description="Renames columns: {name in the file: expected name}."
    )
    max_prompt_tokens: int = Field(
        default=1024,
        gt=0,
        le=MOST_TOKENS,
        description="Longer rows are refused (where nothing is generated: prompt + completion).",
    )
    max_rows: int | None = Field(
        default=None,
        gt=0,
        le=2**40,
        description="Use so many rows of each source at most, the first ones; default: all.",
    )
    on_bad_row: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="Refuse data with a bad or too long row, or skip such rows and list them in skipped-rows.jsonl.",
    )

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The sources; one where only a path is given."""
        return (DataSource(path=self.train),) if isinstance(self.train, str) else self.train

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the sources."""
        return tuple(source.weight for source in self.sources)

    @property
    def name(self) -> str:
        """The sources' paths, for sentences."""
        return ", ".join(source.path for source in self.sources)


class RewardSource(Settings):
    """What rewards of both kinds have in common."""

    weight: float = Field(default=1.0, description="Factor of its value in the score.")
    per: Literal["sequence", "step", "token"] = Field(
        default="sequence",
        description="It gives an answer a number, or a list: [token, number] of each step, or each token's number.",
    )
    concurrency: int = Field(
        default=64,
        gt=0,
        le=4096,
        description="Calls of an async function, or requests to a url, at the same time.",
    )
    cache: bool = Field(
        default=False,
        description="Keep values in the run folder: an equal answer to an equal row is not judged again.",
    )


class RewardFunction(RewardSource):
    """A Python reward."""

    function: str = Field(
        pattern=r"^[^:]+:[A-Za-z_]\w*$",
        description="Where it is: `module:function`, `file.py:function` or `builtin:NAME`.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Further keyword arguments; name a secret as {env: VARIABLE} or {block: PREFECT_SECRET}.",
    )

    @property
    def name(self) -> str:
        """The reward's name in metrics: `rewards/<name>/mean`."""
        return self.function.rpartition(":")[2]

    @property
    def location(self) -> str:
        """Where it is, for sentences."""
        return self.function

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What it is given, which may name secrets."""
        return self.kwargs


class RewardService(RewardSource):
    """A reward that an HTTP service computes."""

    url: str = Field(
        pattern=r"^https?://[^/?#\s@]+([/?][^\s#]*)?$",
        max_length=2000,
        description="Where answers are sent, as a POST of JSON; no other address is asked.",
    )
    headers: dict[str, Any] = Field(
        default_factory=dict,
        description="Further headers; name a secret as {env: VARIABLE} or {block: PREFECT_SECRET}.",
    )
    answers_per_request: int = Field(default=64, gt=0, le=MOST_SEQS, description="Answers of one request.")
    request_timeout_s: float = Field(
        default=30.0, gt=0, le=MOST_SECONDS, description="Seconds that one request may take."
    )
    retries: int = Field(
        default=3, ge=0, le=20, description="Further tries where the service fails or is busy."
    )
    allow_private: bool = Field(
        default=False, description="Allow an address on this machine or in a private network."
    )

    @field_validator("url")
    @classmethod
    def _names_host_and_port(cls, value: str) -> str:
        url = urlsplit(value)
        if not url.hostname or url.port == 0:  # reading the port raises ValueError where it is none
            raise ValueError(f"{value} names no host, or the port 0")
        return value

    @property
    def name(self) -> str:
        """The reward's name in metrics: the last word of the path, else the host."""
        words = [word for word in re.split(r"\W+", self.url.partition("//")[2].partition("?")[0]) if word]
        return words[-1] if "/" in self.url.partition("//")[2].rstrip("/") else "_".join(words)

    @property
    def location(self) -> str:
        """Where it is, for sentences."""
        return self.url

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What it is given, which may name secrets."""
        return self.headers


FUNCTION_REWARD, SERVICE_REWARD = "function-reward", "service-reward"  # tags


def _kind_of_reward(value: Any) -> str:
    is_service = "url" in value if isinstance(value, Mapping) else isinstance(value, RewardService)
    return SERVICE_REWARD if is_service else FUNCTION_REWARD


Reward = Annotated[
    Annotated[RewardFunction, Tag(FUNCTION_REWARD)] | Annotated[RewardService, Tag(SERVICE_REWARD)],
    Discriminator(_kind_of_reward),
]


class EnvironmentConfig(Settings):
    """What answers the model turn by turn: an object of the user's for each response, with `reset(row, seed)` and
    `step(text) -> (observation, reward, done)`."""

    factory: str = Field(
        pattern=r"^[^:]+:[A-Za-z_]\w*$",
        description="The class or function that makes one: `module:name`, `file.py:name` or `builtin:NAME`.",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments.")
    max_turns: int = Field(
        default=8,
        gt=0,
        le=4096,
        description="Most turns of a response; it is truncated where these do not end it.",
    )
    max_turn_tokens: int | None = Field(
        default=None,
        gt=0,
        le=MOST_TOKENS,
        description="Most tokens that the model draws in a turn; default: what is left of "
        "sampling.max_completion_length, which counts all turns and observations.",
    )
    max_observation_tokens: int | None = Field(
        default=None,
        gt=0,
        le=MOST_TOKENS,
        description="Most tokens of an observation: the run ends at a longer one; default: "
        "sampling.max_completion_length.",
    )
    turn_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=MOST_SECONDS,
        description="Seconds for the answers to one turn of a rank's batch.",
    )

    @property
    def name(self) -> str:
        """Its name in metrics: `rewards/<name>/mean`."""
        return self.factory.rpartition(":")[2]


class RewardModelScore(Settings):
    """How the reward model's raw score s enters the sum: weight * clip((s - mean) / std, -clip, clip)."""

    weight: float = Field(default=1.0, description="Factor of the normalised score.")
    mean: float = Field(default=0.0, description="Subtracted from the raw score.")
    std: float = Field(default=1.0, gt=0, description="Divides the centred score.")
    clip: float | None = Field(
        default=None, gt=0, description="Bound of the normalised score; default: none."
    )


class SamplingConfig(Settings):
    """How responses are sampled."""

    max_completion_length: int = Field(
        gt=0, le=MOST_TOKENS, description="Maximum tokens of a response, including the end token."
    )
    segment_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Most tokens of a response that an iteration draws: what has not ended goes on in the next one, "
        "with its weights, and is learned from when it ends; default: each response is drawn to its end.",
    )
    temperature: float = Field(default=1.0, ge=0, description="Divides the logits; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Probability mass that is kept; 1 keeps all.")
    top_k: int = Field(
        default=0, ge=0, le=2**31 - 1, description="Number of tokens that are kept; 0 keeps all."
    )
    min_new_tokens: int = Field(
        default=0,
        ge=0,
        le=MOST_TOKENS,
        description="Tokens of a response that come before any that may end it: of these many, none is an end token, "
        "and a stop string does not end it.",
    )
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = Field(
        default=(),
        max_length=MOST_STOPS,
        description="Ids of tokens that end a response besides the model's own end tokens.",
    )
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(),
        max_length=MOST_STOPS,
        description="Strings that end a response. The token that completes one is its last token and stays whole.",
    )

    @field_validator("stop_token_ids", "stop_strings")
    @classmethod
    def _each_once(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """Sorted, each once: the order in which they are named does not make another run."""
        return tuple(sorted(set(value)))

    @model_validator(mode="after")
    def _responses_can_end(self) -> Self:
        if self.min_new_tokens > self.max_completion_length:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_completion_length={self.max_completion_length}. "
                "Lower the one or raise the other."
            )
        if self.segment_tokens is not None and self.segment_tokens >= self.max_completion_length:
            raise ValueError(
                f"segment_tokens={self.segment_tokens} cuts no response of max_completion_length="
                f"{self.max_completion_length}. Lower it or leave it out."
            )
        size = sum(len(string.encode(errors="replace")) for string in self.stop_strings)
        if size > MOST_STOP_BYTES:
            raise ValueError(
                f"stop_strings have {size} bytes together, more than {MOST_STOP_BYTES}. Name fewer or shorter ones."
            )
        return self


class EvaluationConfig(Settings):
    """Evaluation on held-out rows during a training run: the model as it then is answers them, and the answers are
    scored by rewards; or it is asked how likely the rows' own completions are.
    """

    data: str = Field(
        min_length=1, description="Held-out rows: JSONL (.gz) or Parquet, read as those of data.train are."
    )
    every: int = Field(
        default=1,
        gt=0,
        le=MOST_ITERATIONS,
        description="Iterations from one evaluation to the next; the last iteration always has one.",
    )
    on_start: bool = Field(
        default=False,
        description="Also evaluate before the first iteration, as step 0 (TRL's eval_on_start).",
    )
    rewards: tuple[Reward, ...] = Field(
        default=(),
        description="Rewards that score the answers, summed with weights; default: the run's.",
    )
    loss: bool = Field(
        default=False,
        description="Also the loss on the rows' completions, as of supervised fine-tuning: eval/loss.",
    )
    max_completion_length: int | None = Field(
        default=None,
        gt=0,
        le=MOST_TOKENS,
        description="Maximum tokens of an answer; default: sampling.max_completion_length.",
    )
    temperature: float = Field(default=0.0, ge=0, description="Divides the logits; 0 is greedy.")
    num_generations: int = Field(default=1, gt=0, le=MOST_SEQS, description="Answers to each row.")
    batch_size: int = Field(
        default=64, gt=0, le=MOST_SEQS, description="Rows that are computed at once, by all ranks together."
    )
    keep_best: int = Field(
        default=0,
        ge=0,
        le=MOST_ITERATIONS,
        description="Snapshots of the highest eval/reward (without rewards: of the lowest eval/loss) that are kept "
        "besides keep_last. With 1 or more, the run's model is exported from the best of its evaluated snapshots, "
        "with 0 from the last snapshot.",
    )

    def is_due(self, iteration: int, total_iterations: int) -> bool:
        """Whether an iteration, counted from 0, ends with an evaluation."""
        return (iteration + 1) % self.every == 0 or iteration + 1 == total_iterations


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule. Steps are optimizer steps (mini-batches), not iterations."""

    learning_rate: float = Field(default=3e-6, gt=0, description="Peak learning rate.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="After the warm-up: constant, or decayed to 0 at the last step."
    )
    warmup_steps: int = Field(
        default=0, ge=0, le=MOST_ITERATIONS, description="Optimizer steps of linear warm-up from 0."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay, on matrices only.")
    adam_betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="Decay rates of AdamW's two moments."
    )
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="Global gradient norm to which gradients are clipped."
    )


class LoraConfig(Settings):
    """Low-rank adapters (LoRA, arXiv:2106.09685): they train, the model's own weights are frozen. No dropout."""

    rank: int = Field(default=16, gt=0, le=MOST_RANK, description="Rank of the adapters (peft's r).")
    alpha: float = Field(
        default=32.0,
        gt=0,
        description="An adapter's output is multiplied by alpha / rank (peft's lora_alpha).",
    )
    targets: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="Linear layers with an adapter (peft's target_modules), as in [q_proj, v_proj]; default: all.",
    )
    export: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="What the run exports: the adapter, a folder for peft; or the model with the adapter merged in.",
    )

    @field_validator("targets")
    @classmethod
    def _in_one_order(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Sorted, each once: the order in which they are named does not make another adapter, or another run."""
        return value and tuple(sorted(set(value)))

    def adapters(self, shape: ModelShape) -> Lora:
        """The adapters of a model. Raises ConfigError for targets that it lacks and for too large a rank."""
        lora = Lora(self.rank, self.alpha, self.targets or tuple(sorted(linear_modules(shape))))
        lora.check(shape)
        return lora


class ClusterConfig(Settings):
    """The ranks: started by us on this machine, or found in a running Dask cluster."""

    address: str | None = Field(
        default=None, description="Scheduler of a running Dask cluster; default: start one."
    )
    n_hosts: int = Field(default=1, gt=0, le=MAX_DEVICES, description="Number of hosts.")
    devices_per_host: int = Field(
        default=1, gt=0, le=MAX_DEVICES, description="Number of ranks (GPUs or CPU slots) per host."
    )

    @model_validator(mode="after")
    def _can_be_planned(self) -> Self:
        check_count(self.n_hosts, self.devices_per_host)
        return self

    @property
    def n_devices(self) -> int:
        return self.n_hosts * self.devices_per_host


class RuntimeConfig(Settings):
    """Deadlines, waits for the disk, and restarts."""

    deadline_floor_s: float = Field(
        default=120.0,
        gt=0,
        le=MOST_SECONDS,
        description="Least deadline of a call, in seconds after its last rank entered it.",
    )
    deadline_factor: float = Field(
        default=20.0, ge=1, le=MOST_SECONDS, description="A call's deadline divided by its predicted time."
    )
    io_floor_s: float = Field(
        default=300.0,
        ge=1,
        le=MOST_SECONDS,
        description="Seconds in which writing or reading a snapshot must make progress; in all it may take any time.",
    )
    io_least_bytes_per_s: float = Field(
        default=1e6,
        gt=0,
        le=1e15,
        description="Bytes per second that count as progress, over io_floor_s seconds.",
    )
    startup_timeout_s: float = Field(
        default=180.0, gt=0, le=MOST_SECONDS, description="Seconds within which the workers must start."
    )
    max_restarts: int = Field(
        default=3, ge=0, le=10**6, description="Restarts of the ranks that are allowed between two commits."
    )


Number = Annotated[int, Field(ge=0, lt=MAX_DEVICES)]
"""The number of a device or a host."""


class ManualAssignment(Settings):
    """The assignment of one call, given by hand: devices or whole hosts by number, and (dp, tp, pp)."""

    devices: tuple[Number, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_DEVICES,
        description="Devices in rank order; give either devices or hosts.",
    )
    hosts: tuple[Number, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_DEVICES,
        description="Hosts, of which all devices are used; give either hosts or devices.",
    )
    dp: int = Field(default=1, gt=0, le=MAX_DEVICES, description="Data-parallel degree.")
    tp: int = Field(default=1, gt=0, le=MAX_DEVICES, description="Tensor-parallel degree.")
    pp: int = Field(default=1, gt=0, le=MAX_DEVICES, description="Number of pipeline stages.")
    micro_batches: int = Field(
        default=1,
        gt=0,
        le=MOST_SEQS,
        description="Micro-batches per dp rank and (mini-)batch. Of a generation, as many sequences as one of them "
        "has are decoded at a time, which takes less memory.",
    )
    balance: Literal["count", "tokens"] = Field(
        default="count", description="What dp ranks get equal shares of: samples (count) or tokens."
    )
    offload: bool = Field(
        default=False, description="Whether a frozen model is kept in host memory while it is not needed."
    )
    order: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Position among the calls of an iteration, given for all calls or for none; default: by rule.",
    )

    @model_validator(mode="after")
    def _placement_holds(self) -> Self:
        if (self.devices is None) == (self.hosts is None):
            raise ValueError(
                f"give either devices or hosts, found {'neither' if self.hosts is None else 'both'}"
            )
        if self.devices is not None:
            self.assignment(len(self.devices))  # checks the strategy against the number of devices
        return self

    def assignment(self, devices_per_host: int) -> CallAssignment:
        """The same, as a `CallAssignment`. Raises ValueError when dp * tp * pp is not the number of devices."""
        if self.devices is None:
            check_count(len(self.hosts or ()), devices_per_host)
        devices = self.devices or tuple(
            host * devices_per_host + device
            for host in self.hosts or ()
            for device in range(devices_per_host)
        )
        placement = Placement(devices, ParallelStrategy(self.dp, self.tp, self.pp))
        return CallAssignment(
            placement=placement,
            micro_batches=self.micro_batches,
            balance=self.balance,
            offload=self.offload,
            order=self.order,
        )


Assignments = dict[str, ManualAssignment]


class Role(NamedTuple):
    """What the engine must know of a role: its initial weights, its head, and whether it trains.

    folder       Hugging Face folder of the initial weights; "" for an inline model
    optimizer    None for a frozen role
    random_init  the folder has only the model's configuration; its weights are drawn from the run's seed
    config       the configuration of an inline model; None where there is a folder
    """

    folder: str
    head: Head
    optimizer: OptimizerConfig | None
    random_init: bool = False
    config: Mapping[str, Any] | None = None

    @staticmethod
    def of(source: ModelSource, head: Head, optimizer: OptimizerConfig | None = None) -> "Role":
        """The role of a model given by folder or inline."""
        if isinstance(source, InlineModel):
            return Role("", head, optimizer, config=source.config)
        return Role(source, head, optimizer)


PlanSource = Annotated[
    Annotated[str, Tag("path")] | Annotated[Assignments, Tag("inline")], Discriminator(_form)
]


def _as_distribution(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, int | str) else value


class HostDevices(Settings):
    """Consecutive hosts that have the same device."""

    n_hosts: int = Field(gt=0, le=MAX_DEVICES, description="Number of hosts of this class.")
    device: str = Field(description="Their device: a preset's name, or a YAML file with its figures.")


DeviceSource = Annotated[
    Annotated[str, Tag("path")] | Annotated[tuple[HostDevices, ...], Tag("inline")], Discriminator(_form)
]


class PlanningConfig(Settings):
    """Settings that only the planner reads: lengths and costs that a run would show by itself, and the devices."""

    prompt_tokens: int | None = Field(
        default=None,
        gt=0,
        le=MOST_TOKENS,
        description="Tokens of a prompt (where nothing is generated: of a row); default: taken from the data.",
    )
    new_tokens: (
        Annotated[
            dict[Annotated[int, Field(gt=0, le=MOST_TOKENS)], Annotated[float, Field(ge=0, le=1)]],
            BeforeValidator(_as_distribution),
        ]
        | None
    ) = Field(
        default=None,
        description="Generated tokens of a response: a number or {number: share}; "
        "default: sampling.max_completion_length.",
    )
    device: DeviceSource | None = Field(
        default=None,
        description="Device: a preset (a100-80g-sxm, h100-sxm, cpu-slot, ...), or a YAML file with its figures; "
        "where hosts differ, [{n_hosts, device}] in the order of the hosts; default: this machine's.",
    )
    reward_seconds_per_sequence: float = Field(
        default=0.0,
        ge=0,
        le=MOST_SECONDS,
        description="Seconds that all Python rewards together take for one sequence, as you measured them; "
        "default: only their node costs time.",
    )
    time_limit_s: float = Field(
        default=10.0, gt=0, le=MOST_SECONDS, description="Seconds that a search may take."
    )

    @field_validator("new_tokens")
    @classmethod
    def _shares_add_up(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        if value is not None and abs(sum(value.values()) - 1) > 1e-6:
            raise ValueError(f"the shares add up to {sum(value.values()):g}, not to 1")
        return value
