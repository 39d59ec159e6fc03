"""The bases of configurations: of algorithms that learn by a policy gradient from their own samples, and of those
that learn from labelled answers against a reference. Torch-free.
"""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.models import GRPOModels, ReferenceModels, Role
from prefect_rlhf.rlhf_tasks.config.reference import MovesReference
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.config.settings import MOST_ITERATIONS, Pair, Settings

MOST_STALENESS = 16
"""Each iteration ahead is one more batch in the memory of the ranks that generate, and in every commit."""


class Correction(Settings):
    """How tokens count that another policy has drawn than the one that is trained: older weights, or an engine that
    rounds otherwise. Their weight is r = p_proximal / p_drawn, with bounds."""

    kind: Literal["auto", "none", "truncated", "masked"] = Field(
        default="auto",
        description="What lies outside the bounds: `truncated` has the weight of the bound (TIS), `masked` is not "
        "learned (MIS); `none`: all tokens count alike; auto: truncated with staleness, segments or "
        "another engine, else none.",
    )
    level: Literal["token", "sequence", "geometric"] | None = Field(
        default=None,
        description="r of each `token`, of the whole `sequence` (the product over its tokens), or their `geometric` "
        "mean; null: as the ratio in the loss.",
    )
    lower: float | None = Field(default=None, gt=0, description="Lower bound of r; null: none.")
    upper: float | None = Field(default=2.0, gt=0, description="Upper bound of r; null: none.")
    veto: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="A response with a token whose r is below this is not learned at all; null: none is left out.",
    )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "Correction":
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"lower={self.lower:g} is above upper={self.upper:g}. Exchange them.")
        return self


_UNWEIGHTED = (
    "generation.engine={engine} with correction.kind=none: tokens count as if the policy had drawn them, with the "
    "probabilities that the engine says. Leave that out, to weight them."
)


class PolicyConfig(Scores, MovesReference):
    """What policies share: they sample at random, and record among which tokens. They may sample ahead of training
    (docs/adr/0017-staleness-is-a-lag.md)."""

    groups: ClassVar[Groups] = {
        "Staleness": ("staleness", "correction"),
        "Guards": ("kl_bound", "equal_rewards_iterations"),
    }
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "staleness",
            "total_iterations",
            "{first} draws all responses of {second} with the initial weights. Choose a smaller staleness or more "
            "iterations.",
            lambda config: config.staleness >= config.total_iterations,
        ),
        Pair(
            "sampling.segment_tokens",
            "chunks",
            "{first} leaves samples of any part for later iterations, and {second} scores part after part. Leave one "
            "of them out.",
        ),
        Pair(
            "correction",
            "staleness",
            "correction weights the tokens that another policy has drawn, but with {second} and without "
            "sampling.segment_tokens there are none. Leave it out, or set its kind.",
            lambda config: (
                config.correction not in (Correction(), Correction(kind="none")) and config.corrects is None
            ),
        ),
        Pair(
            "kl_bound",
            "beta",
            "{first} bounds the KL divergence from the reference, and with {second} the run has none. Raise beta or "
            "leave out kl_bound.",
            lambda config: config.kl_bound is not None and "ref" not in config.roles(),
        ),
        Pair(
            "sampling.temperature",
            "type",
            "{first} is greedy, but {second} must explore. Choose 1.0, for example.",
            lambda config: config.sampling.temperature == 0,
        ),
    )

    staleness: int = Field(
        default=0,
        ge=0,
        le=MOST_STALENESS,
        description="Iterations by which sampling runs ahead of training: responses are drawn with the weights of "
        "that many iterations before.",
    )
    correction: Correction = Field(
        default=Correction(), description="Weights of tokens that another policy has drawn."
    )
    kl_bound: float | None = Field(
        default=None,
        gt=0,
        description="An anomaly: a mean KL divergence from the reference above this (metric kl, nats per sequence).",
    )
    equal_rewards_iterations: int | None = Field(
        default=None,
        gt=0,
        le=MOST_ITERATIONS,
        description="An anomaly: so many iterations in a row whose rewards are all equal (with groups: in each).",
    )

    @property
    def learns_from_older(self) -> bool:
        """Whether older weights have drawn what the policy learns from: ahead of its training, or in segments."""
        return self.staleness > 0 or self.sampling.segment_tokens is not None

    @property
    def corrects(self) -> Correction | None:
        """How tokens are weighted by who has drawn them; None: all count alike."""
        drawn_by_others = self.learns_from_older or not self.generation.is_own
        applies = drawn_by_others if self.correction.kind == "auto" else self.correction.kind != "none"
        return self.correction if applies else None

    @property
    def infers_proximal(self) -> bool:
        """Whether a separate pass computes the proximal policy's log-probabilities before the train_step. A
        train_step of one optimizer step gets them from its own forward pass."""
        return self.corrects is not None and self.num_mini_batches * self.passes > 1

    @property
    def oldest(self) -> int:
        """The most train calls between drawing a token and learning from it.

        With segments, an iteration draws at least one segment of each sequence, with an environment one turn. A group
        that has ended waits for at most one iteration: of the groups of two batches, fewer than one batch are then
        before it.
        """
        segment = self.sampling.segment_tokens
        if segment is None:
            return self.staleness
        most = -(-self.sampling.max_completion_length // segment)
        return self.staleness + (most if self.environment is None else self.environment.max_turns)

    @property
    def warning(self) -> str | None:
        if self.corrects is not None:
            return None
        if not self.learns_from_older:
            return None if self.generation.is_own else _UNWEIGHTED.format(engine=self.generation.engine)
        which = f"staleness={self.staleness}"
        if self.sampling.segment_tokens is not None:
            which = f"sampling.segment_tokens={self.sampling.segment_tokens}"
        return (
            f"{which} with correction.kind=none: tokens that older weights have drawn count as if "
            "the policy had drawn them. Leave that out, to weight them."
        )

    @property
    def records_kept(self) -> bool:
        """Whether samples record which tokens could be drawn: training must leave out the same tokens."""
        sampling = self.sampling
        return sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_new_tokens > 0


class CriticFreeConfig(PolicyConfig):
    """Policies without a learned critic: an actor, and a reference if the KL divergence from it counts."""

    groups: ClassVar[Groups] = {
        "Training": ("num_iterations",),
        "KL": ("beta",),
        "Loss": ("epsilon", "epsilon_high", "mask_truncated_completions"),
    }
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "models.ref",
            "beta",
            "{first} is named, but {second} uses no reference. Leave it out, or set beta.",
            lambda config: config.models.ref is not None and config.beta == 0,
        ),
    )

    models: GRPOModels
    beta: float = Field(
        default=0.0,
        ge=0,
        description="Factor of the KL divergence from the reference; 0: no reference model.",
    )
    epsilon: float = Field(
        default=0.2, gt=0, lt=1, description="Lower bound of the policy ratio: 1 - epsilon."
    )
    epsilon_high: float | None = Field(
        default=None, gt=0, description="Upper bound of the policy ratio: 1 + epsilon_high; default: epsilon."
    )
    num_iterations: int = Field(default=1, gt=0, le=1000, description="Passes over an iteration's batch.")
    mask_truncated_completions: bool = Field(
        default=False,
        description="Learn nothing from responses without end token; their scores still count in their group.",
    )

    @property
    def passes(self) -> int:
        """Epochs over an iteration's batch."""
        return self.num_iterations

    @property
    def high(self) -> float:
        """The ratio's upper bound is 1 + this."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def roles(self) -> dict[str, Role]:
        """Actor, ref where the KL divergence counts, and the models that judge."""
        models = self.models
        roles = {"actor": Role.of(models.actor, "lm", self.optimizer)}
        if self.beta > 0:
            roles["ref"] = Role.of(models.ref or models.actor, "lm")
        return roles | models.judges


class PreferenceConfig(MovesReference):
    """An actor is trained; a reference says how likely each answer was before."""

    groups: ClassVar[Groups] = {"Loss": ("beta",)}

    models: ReferenceModels
    beta: float = Field(
        default=0.1,
        gt=0,
        description="How strongly the actor is held to the reference: larger, closer to it.",
    )

    def roles(self) -> dict[str, Role]:
        """The actor, and the reference."""
        return {
            "actor": Role.of(self.models.actor, "lm", self.optimizer),
            "ref": Role.of(self.models.ref or self.models.actor, "lm"),
        }
