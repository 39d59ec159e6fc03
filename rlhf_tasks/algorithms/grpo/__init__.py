"""Group-relative policy optimisation."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Protocol, Self

from pydantic import Field, model_validator

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import CriticFreeConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import (
    PROMPT_KEYS,
    Handle,
    Models,
    PolicySizes,
    learned,
    rollout,
    traced,
)
from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.sampling import SamplesGroups
from prefect_rlhf.rlhf_tasks.config.settings import MOST_SEQS, Pair
from prefect_rlhf.rlhf_tasks.data.rows import PromptExample, prompt_example
from prefect_rlhf.rlhf_tasks.spec import Decision, ModelFunctionCall


class GRPOConfig(CriticFreeConfig, SamplesGroups):
    """Group-relative policy optimisation (arXiv:2402.03300): a response counts by its score relative to its group."""

    type: Literal["grpo"] = "grpo"
    groups: ClassVar[Groups] = {
        "Score": ("overlong_buffer", "overlong_penalty"),
        "Advantages": ("scale_rewards", "filter_groups"),
        "Loss": ("loss_type", "importance_sampling_level", "delta"),
    }
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "filter_groups",
            "chunks",
            "{first} cuts generation into rounds, and {second} into parts. Lower one of them to 1.",
            lambda config: config.max_rounds > 1 and config.chunks > 1,
        ),
        Pair(
            "staleness",
            "filter_groups",
            "{first} samples ahead of scoring, but {second} waits for the scores of each round before the next. Set "
            "staleness: 0, or filter_groups: 1.",
            lambda config: config.max_rounds > 1 and config.staleness,
        ),
        Pair(
            "sampling.segment_tokens",
            "filter_groups",
            "{first} leaves samples for later iterations, but {second} fills a batch at once. Leave the first "
            "out, or set filter_groups: 1.",
            lambda config: config.max_rounds > 1 and config.sampling.segment_tokens is not None,
        ),
        Pair(
            "delta",
            "loss_type",
            "{first} bounds a clipped ratio, which {second} does not have. Leave it out.",
            lambda config: config.delta is not None and config.loss_type == "cispo",
        ),
    )

    num_generations: int = Field(
        default=8, ge=2, le=MOST_SEQS, description="Samples per prompt, which form a group."
    )
    beta: float = Field(
        default=0.0,
        ge=0,
        description="Factor of the KL divergence from the reference (k3, in the loss); 0: no reference model.",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group",
        description="The standard deviation by which a score less its group's mean is divided: that of the group, of "
        "the batch, or none.",
    )
    filter_groups: int = Field(
        default=0,
        ge=0,
        le=16,
        description="Drop groups whose scores (before overlong_penalty) are all equal, from the loss and its "
        "denominators: 0 (false) keeps them; 1 (true) drops them; more: samples up to so many rounds of batch_size, "
        "until enough groups differ to fill the batch.",
    )
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = Field(
        default="grpo",
        description="grpo: mean over each response, then over responses; dapo: mean over all tokens; dr_grpo: sum "
        "over all tokens / (responses * max_completion_length); cispo: mean over all tokens, with a "
        "bounded weight instead of a clipped ratio.",
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="token", description="Policy ratio per token, or the geometric mean over a response (GSPO)."
    )
    delta: float | None = Field(
        default=None,
        gt=1,
        description="Policy ratio above which a token with a negative advantage costs no more; default: none.",
    )
    overlong_buffer: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of max_completion_length, at its end, over which a length penalty grows; default: none.",
    )
    overlong_penalty: float = Field(
        default=1.0, gt=0, description="What the longest response loses of its score (with overlong_buffer)."
    )

    @property
    def max_rounds(self) -> int:
        """Most rounds in which the samples of an iteration come."""
        return max(1, self.filter_groups)

    @model_validator(mode="after")
    def _bounds_agree(self) -> Self:
        if self.delta is not None and self.delta <= 1 + self.high:
            raise ValueError(
                f"delta={self.delta:g} must exceed the ratio's upper bound 1 + {self.high:g}. Make it larger."
            )
        return self


class GRPOSizes(PolicySizes, Protocol):
    """The fields of a GRPO configuration that the graph depends on."""

    @property
    def max_rounds(self) -> int: ...


@traced(PROMPT_KEYS)
def one_round(models: Models, prompts: Handle, config: PolicySizes) -> None:
    """actor generate; reward inference, and ref inference where beta > 0; actor train_step.

    A sequence's advantage is its score relative to its group (arXiv:2402.03300, section 4.1), so there is no critic.
    """
    models.actor.train(rollout(models, prompts, config).select(*learned(config)))


def graph(config: GRPOSizes) -> list[ModelFunctionCall]:
    """The calls of one round, or of several."""
    return in_rounds(one_round(config), config.max_rounds)


DIFFERING = "groups/differing"
"""The metric of each round: how many of its groups have scores that differ."""

MORE = "more_groups"


def missing(before: float, metrics: Mapping[str, float]) -> float:
    """How many groups a batch lacks that differ, after a round; `before` after the rounds before it."""
    return before - metrics[DIFFERING]


def in_rounds(calls: Sequence[ModelFunctionCall], rounds: int) -> list[ModelFunctionCall]:
    """The calls of an iteration that samples in rounds: each round is a part of generation and scoring, and runs
    where the rounds before it have left the batch without enough groups that differ.

    The train_step, the last call, gets the samples of all rounds.
    """
    if rounds == 1:
        return list(calls)
    *sampling, train = calls
    more = Decision(name=MORE, function=f"{__name__}:missing", first=train.n_groups, each_part=True)
    in_parts = [
        call.model_copy(
            update={
                "n_seqs": rounds * call.n_seqs,
                "chunks": rounds,
                "when": MORE,
                "decides": (more,) if "scores" in call.outputs else (),
            }
        )
        for call in sampling
    ]
    return [*in_parts, train.model_copy(update={"rounds": rounds})]


ALGORITHM = Algorithm(
    config=GRPOConfig,
    graph=graph,
    dataset_keys=PROMPT_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="prefect_rlhf.rlhf_tasks.algorithms.grpo.functions",
)
