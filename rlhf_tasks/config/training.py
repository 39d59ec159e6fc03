"""The base class of configurations whose runs train. Torch-free."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from prefect_rlhf.rlhf_tasks.config.base import Groups, Judges
from prefect_rlhf.rlhf_tasks.config.models import (
    HubPush,
    LoraConfig,
    OptimizerConfig,
    named_alone,
)
from prefect_rlhf.rlhf_tasks.config.responses import (
    EvaluationConfig,
    RewardConfig,
)
from prefect_rlhf.rlhf_tasks.config.sampling import Samples, Scores, refuse_equal_names
from prefect_rlhf.rlhf_tasks.config.settings import (
    MOST_ITERATIONS,
    MOST_SEQS,
    MOST_TOKENS,
    Pair,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape, Recompute


class TrainingConfig(Judges):
    """The configuration that training runs share. An iteration makes `num_mini_batches` optimizer steps per epoch."""

    groups: ClassVar[Groups] = {
        "": ("total_iterations",),
        "Training": ("num_mini_batches", "optimizer", "lora", "gradient_checkpointing", "micro_batch_tokens"),
        "Guards": ("on_anomaly",),
        "Evaluation": ("evaluation",),
        "Run": ("push_to_hub",),
    }
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "num_mini_batches",
            "batch_size",
            "{first} does not divide {second}. Make batch_size a multiple of it.",
            lambda config: config.batch_size % config.num_mini_batches,
        ),
        Pair(
            "evaluation.every",
            "total_iterations",
            "{first} is more than {second}. Lower it.",
            lambda config: config.evaluation and config.evaluation.every > config.total_iterations,
        ),
        Pair(
            "evaluation.every",
            "snapshot_every",
            "evaluation.keep_best keeps evaluated snapshots, but {first} is no multiple of {second}. Make it one.",
            lambda config: (
                config.evaluation
                and config.evaluation.keep_best
                and isinstance(config.snapshot_every, int)
                and config.evaluation.every % config.snapshot_every
            ),
        ),
    )

    total_iterations: int = Field(gt=0, le=MOST_ITERATIONS, description="Iterations of the run.")
    num_mini_batches: int = Field(
        default=1, gt=0, le=MOST_SEQS, description="Optimizer steps per pass over the batch."
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="The actor's optimizer.")
    lora: LoraConfig | None = Field(
        default=None, description="Train low-rank adapters of every role that trains; default: all weights."
    )
    gradient_checkpointing: Recompute = Field(
        default="none",
        description="Activations that the backward pass computes again, to save memory: none; selective (what is "
        "cheap: saves half of the memory, costs little time); full (all: costs a forward pass). false "
        "means none, true full.",
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        gt=0,
        le=MOST_TOKENS,
        description="Most tokens of a micro-batch in training and inference; a longer sample has its own. A "
        "rank's batch is cut into as many as that takes, at least micro_batches. Default: no limit.",
    )
    on_anomaly: Literal["stop", "skip", "warn"] = Field(
        default="skip",
        description="stop: an anomaly ends the run at its last commit; skip: its update is left out, and three train "
        "calls in a row without an update end the run; warn: only said. A step whose loss or gradient is not finite "
        "is never applied.",
    )
    evaluation: EvaluationConfig | None = Field(
        default=None,
        description="Scores of answers to held-out rows during the run, as metrics eval/...; default: none.",
    )

    push_to_hub: Annotated[HubPush | None, BeforeValidator(named_alone)] = Field(
        default=None,
        description="ORG/NAME of a private model on the Hugging Face Hub that gets the finished model; "
        "{repo: ORG/NAME, private: false}: of a public one.",
    )

    def adapters_of(self, role: str, shape: ModelShape) -> Lora | None:
        """Those of `lora`, for a role that trains."""
        trains = self.roles()[role].optimizer is not None
        return self.lora.adapters(shape) if self.lora is not None and trains else None

    @property
    def exports_adapters(self) -> bool:
        return self.lora is not None and self.lora.export == "adapter"

    def iterations(self, n_rows: int) -> int:
        """`total_iterations`, whatever the number of rows."""
        return self.total_iterations

    @property
    def evaluated_every(self) -> int | None:
        asked = self.evaluation
        return asked.every if asked is not None and asked.keep_best else None

    @property
    def scoring_rewards(self) -> tuple[RewardConfig, ...]:
        return tuple(reward for reward in self.rewards if reward.used_in != "evaluation")

    @property
    def rewards_of_evaluation(self) -> tuple[RewardConfig, ...]:
        """The rewards of the answers to held-out rows."""
        asked = self.evaluation is not None
        return tuple(reward for reward in self.rewards if asked and reward.used_in != "training")

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _all_or_none(cls, value: Any) -> Any:
        return {False: "none", True: "full"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _can_be_evaluated(self) -> Self:
        asked = self.evaluation
        if asked is None:
            return self
        actor = self.roles().get("actor")
        if actor is None or actor.optimizer is None or actor.head != "lm":
            raise ValueError(
                f"evaluation: its answers are those of a language model that trains, and a run of type {self.type!r} "
                "trains none. Leave it out."
            )
        played = self.rewarding_environment if isinstance(self, Scores) else None
        if not self.rewards_of_evaluation and played is None and not asked.loss:
            raise ValueError(
                "evaluation: nothing scores the answers. Name a function under rewards, or set evaluation.loss: true "
                "for the loss on the rows' completions."
            )
        if (
            self.rewards_of_evaluation
            and asked.max_completion_length is None
            and not isinstance(self, Samples)
        ):
            raise ValueError(
                f"evaluation: a run of type {self.type!r} has no sampling.max_completion_length. Give "
                "evaluation.max_completion_length."
            )
        names = [reward.name for reward in self.rewards_of_evaluation]
        refuse_equal_names(names if played is None else [*names, played.name])
        return self

    @model_validator(mode="after")
    def _rewards_have_a_use(self) -> Self:
        for number, reward in enumerate(self.rewards):
            if reward.asks_a_role and reward in self.rewards_of_evaluation:
                raise ValueError(
                    f"rewards.{number}: without url, builtin:judge asks models.judge, which replies in training "
                    "only. Set used_in: training, or give it the url of a service."
                )
            if reward.used_in == "evaluation" and self.evaluation is None:
                raise ValueError(
                    f"rewards.{number}.used_in=evaluation: the run has no section evaluation. Add one, or leave out "
                    f"{reward.name!r}."
                )
            if not isinstance(self, Scores) and (self.evaluation is None or reward.used_in == "training"):
                raise ValueError(
                    f"rewards.{number}: a run of type {self.type!r} uses rewards in its evaluation only. Add a "
                    f"section evaluation and used_in: evaluation, or leave out {reward.name!r}."
                )
        return self

    @model_validator(mode="after")
    def _groups_stay_whole(self) -> Self:
        size, batch = self.group_size, self.batch_size
        if batch // self.num_mini_batches % size:
            raise ValueError(
                f"num_mini_batches={self.num_mini_batches} cuts batch_size={batch} into mini-batches of "
                f"{batch // self.num_mini_batches} samples, which split groups of num_generations={size}. "
                f"Choose a num_mini_batches that divides batch_size / num_generations = {batch // size}."
            )
        return self

    @model_validator(mode="after")
    def _learns_from_scores(self) -> Self:
        if isinstance(self, Scores) and not self.score_names and self.scoring_role != "reward":
            raise ValueError(
                "nothing scores the responses. Name a function under rewards, an environment, or a reward model in "
                "models.reward."
            )
        return self
