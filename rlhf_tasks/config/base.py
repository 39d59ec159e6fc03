"""The base class of run configurations, built from the sections in the modules beside it. Torch-free.

Every configuration is a `RunConfig`. Its other bases say what its runs do: `TrainingConfig` (training.py) trains; of
sampling.py, `Samples` generates, `SamplesGroups` several times for each prompt, `Scores` generates and scores,
`OnePass` does that once for each row; `Judges` has rewards, of its own samples or of answers to held-out rows. Code
outside `algorithms/` checks for these bases, never for an algorithm.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from prefect_rlhf.rlhf_tasks.config.cluster import (
    STARTUP_S,
    ClusterConfig,
    Limits,
    PlanningConfig,
    PlanSource,
    SnapshotCadence,
    most_lost_s,
    refuse_unfit,
)
from prefect_rlhf.rlhf_tasks.config.data import DataConfig, RunRows
from prefect_rlhf.rlhf_tasks.config.files import faults_of
from prefect_rlhf.rlhf_tasks.config.models import (
    Role,
)
from prefect_rlhf.rlhf_tasks.config.responses import (
    RewardConfig,
    routed,
)
from prefect_rlhf.rlhf_tasks.config.settings import (
    MOST_ITERATIONS,
    MOST_SECONDS,
    MOST_SEQS,
    Pair,
    Settings,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

RUN_NAME, MOST_OF_A_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$", 200

TrackerName = Literal["tensorboard", "wandb", "mlflow"]
Groups = Mapping[str, tuple[str, ...]]
"""Heading in a form -> the fields below it. Fields under the empty heading are asked first."""


class RunConfig(Settings):
    """The configuration that all runs share.

    type    the algorithm's name: each class declares a Literal of one value, which is also the default
    models  where each role's weights are: `ActorOnly` or a subclass of it
    groups  where the fields that a class declares are in a form; a class adds to the groups of its bases
    pairs   which settings do not go together; a class adds to the pairs of its bases
    """

    groups: ClassVar[Groups] = {
        "": ("models", "data"),
        "Batch": ("batch_size",),
        "Run": (
            "name",
            "output_dir",
            "seed",
            "dtype",
            "resume",
            "snapshot_every",
            "keep_last",
            "report_to",
        ),
        "Execution": ("cluster", "plan", "planning", "patience", "max_restarts", "on_device_loss"),
        "Fixed": ("type",),
    }
    pairs: ClassVar[tuple[Pair, ...]] = ()

    if TYPE_CHECKING:  # each class declares its own
        type: Any
        models: Any

    data: DataConfig
    name: str | None = Field(
        default=None,
        pattern=RUN_NAME,
        max_length=MOST_OF_A_NAME,
        description="The run folder's name; default: a new name.",
    )
    output_dir: str = Field(default="runs", description="Folder of the run folders; all hosts must share it.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of everything random.")
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = Field(
        default="auto",
        description="Type of the parameters; of bfloat16 the optimizer holds float32 master weights. auto: bfloat16 "
        "on GPUs that multiply it, float32 elsewhere.",
    )
    batch_size: int = Field(
        default=64, gt=0, le=MOST_SEQS, description="Sequences, or preference pairs, per iteration."
    )
    resume: str = Field(default="never", description="never, auto (where the run exists) or a run folder.")
    snapshot_every: SnapshotCadence = Field(
        default="auto",
        description="Iterations from one committed snapshot to the next; or auto: as often as writing them stays "
        "below 5% of the time, but at the latest after 1800 s of work that may be lost, or after those of a time "
        "such as 600s.",
    )
    keep_last: int = Field(
        default=2,
        ge=2,
        le=MOST_ITERATIONS,
        description="Snapshots that are kept; at least 2, so that one is left if the last is damaged.",
    )
    report_to: tuple[TrackerName, ...] = Field(
        default=(), max_length=3, description="Trackers that get the metrics of each commit, too."
    )
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="Where the ranks run.")
    plan: PlanSource = Field(
        default="heuristic",
        description="heuristic, auto (searched), adaptive (searched, and during the run again where measured times "
        "drift from planned ones), a YAML file, or {call: placement}. A placement is devices or hosts in rank order "
        "and what is not the default, e.g. 0-3 d2 t2 p1 m4 tokens sharded offload order0, or hosts 0,2 t8. d, t, p, "
        "c: degrees of data, tensor, pipeline and context parallelism (1); m: micro-batches of a dp rank's "
        "(mini-)batch (1), of which a generation decodes one at a time; tokens: dp ranks get equal shares of tokens, "
        "not of samples; "
        "sharded: dp ranks have shares of the weights (ZeRO-3); offload: host memory has an idle frozen model; of "
        "a train_step, the optimizer's state and an idle model; order: the call's number, for all calls or none.",
    )
    planning: PlanningConfig = Field(
        default=PlanningConfig(), description="Settings that only the planner reads."
    )
    patience: float = Field(
        default=1.0,
        ge=0.05,
        le=1e6,
        description="Factor of the waits for calls, ranks, disks and starting workers: 2 waits twice as long.",
    )
    max_restarts: int = Field(
        default=3, ge=0, le=10**6, description="Restarts of the ranks that are allowed between two commits."
    )
    on_device_loss: Literal["wait", "shrink", "stop"] = Field(
        default="wait",
        description="Where a rank has not come back 310 s after a fault (times a patience above 1): wait again, as "
        "often as max_restarts allows; shrink: continue from the last commit by a plan for the devices that are "
        "left, until others are back; stop: end there.",
    )

    if not TYPE_CHECKING:  # pyright knows the fields

        def __init__(self, **settings: Any) -> None:
            """Raises ConfigError with a sentence for each fault, as for a file."""
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ConfigError(faults_of(error, type(self))) from None

        __init__.__pydantic_base_init__ = True  # validation of a document does not pass here

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema, with the groups of all fields under the key `groups`."""
        schema = handler(core_schema)
        handler.resolve_ref_schema(schema)["groups"] = cls.headings()
        return schema

    @classmethod
    def headings(cls) -> dict[str, list[str]]:
        """The groups of all fields: heading -> the fields below it, those of the bases first."""
        groups: dict[str, list[str]] = {}
        for base in reversed(cls.__mro__):
            for heading, names in vars(base).get("groups", {}).items():
                for others in groups.values():  # a class may move a field of its bases
                    others[:] = [name for name in others if name not in names]
                groups.setdefault(heading, []).extend(names)
        return groups

    @abstractmethod
    def roles(self) -> dict[str, Role]:
        """Every role of the run, by its name in the graph. `reward` is there only where a reward model scores."""

    def adapters_of(self, role: str, shape: ModelShape) -> Lora | None:
        """The adapters that a role trains; None where all of it trains, or nothing. Raises ConfigError."""
        return None

    @property
    def exports_adapters(self) -> bool:
        """Whether the run exports adapters alone, as a folder for peft."""
        return False

    @property
    def follows(self) -> Mapping[str, str]:
        """Role that no call trains -> the trained role whose weights are blended into its own."""
        return {}

    @abstractmethod
    def iterations(self, n_rows: int) -> int:
        """The number of iterations of a run whose data set has `n_rows` rows."""

    @property
    def group_size(self) -> int:
        """Consecutive samples that are made from one row. They stay on one dp rank and in one mini-batch."""
        return 1

    def row_of(self, rows: RunRows, sample: int) -> int:
        """The index of the row that a sample, given by its global id, is made from. Each epoch is shuffled anew."""
        return rows.row_of(sample // self.group_size, self.seed, self.data.weights)

    def values_of(self, rows: RunRows, sample: int) -> Mapping[str, Any]:
        """The values of a sample, given by its global id, under each key of the data set: those of its row."""
        return rows.values(self.row_of(rows, sample))

    @property
    def passes(self) -> int:
        """How often a train call passes over an iteration's batch."""
        return 1

    @property
    def warning(self) -> str | None:
        """A sentence about a setting that is allowed but probably not intended; None where there is none."""
        return None

    @property
    def evaluated_every(self) -> int | None:
        """Iterations between snapshots that may be kept for their evaluations; None if none is kept for that."""
        return None

    @property
    def startup_s(self) -> float:
        """Seconds within which the workers must start."""
        return STARTUP_S * self.patience

    @property
    def limits(self) -> Limits:
        """What the ledger needs to know of the configuration."""
        return Limits.of(
            self.patience,
            self.max_restarts,
            snapshot_every="auto" if isinstance(self.snapshot_every, str) else self.snapshot_every,
            snapshot_max_s=most_lost_s(self.snapshot_every),
            evaluated_every=self.evaluated_every,
            awaits_lost=self.on_device_loss == "wait",
        )

    @model_validator(mode="before")
    @classmethod
    def _ahead_only_with_a_correction(cls, document: Any) -> Any:
        if isinstance(document, dict) and "staleness" in document and "staleness" not in cls.model_fields:
            if document["staleness"] == 0:  # so is every run that cannot sample ahead
                return {key: value for key, value in document.items() if key != "staleness"}
            lacks = (
                "no policy ratio that could correct for older weights"
                if "sampling" in cls.model_fields
                else "no generation that could run ahead of training"
            )
            raise ValueError(
                f"staleness: {document.get('type')} has {lacks}. Leave it out, or choose an algorithm that has one, "
                "such as grpo or ppo."
            )
        return document

    @field_validator("report_to")
    @classmethod
    def _each_tracker_once(cls, value: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"names a tracker twice: {', '.join(value)}. Name each once.")
        return value

    @model_validator(mode="after")
    def _settings_go_together(self) -> Self:
        for base in reversed(type(self).__mro__):
            for pair in vars(base).get("pairs", ()):
                if fault := pair.fault(self, base):
                    raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _plan_fits_cluster(self) -> Self:
        if not isinstance(self.plan, str):
            refuse_unfit(self.plan, self.cluster)
        return self


class Judges(RunConfig):
    """The configuration of runs in which rewards judge answers: the run's own, or those to held-out rows."""

    groups: ClassVar[Groups] = {
        "Evaluation": ("rewards",),
        "Score": ("on_reward_error", "reward_timeout_s", "reward_processes", "reward_memory_bytes"),
    }

    rewards: Annotated[tuple[RewardConfig, ...], BeforeValidator(routed)] = Field(
        default=(),
        description="Python rewards and HTTP services, summed with weights: a list, or {by: COLUMN, VALUE: [...]} "
        "with a list for each value of a column.",
    )
    on_reward_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="stop: where a reward fails, the run ends; skip: the samples that it fails on leave the batch.",
    )
    reward_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=MOST_SECONDS,
        description="Seconds that rewards may take for a rank's batch, and an environment for a turn of it.",
    )
    reward_processes: int = Field(
        default=1,
        gt=0,
        le=256,
        description="Processes of Python rewards on each rank. They share the rewards, and the answers that are "
        "judged one by one.",
    )
    reward_memory_bytes: int = Field(
        default=4 * 2**30,
        gt=0,
        description="Bytes of memory for each process of Python rewards and all that it starts.",
    )

    @property
    def scoring_rewards(self) -> tuple[RewardConfig, ...]:
        """The rewards of the run's own samples."""
        return self.rewards
