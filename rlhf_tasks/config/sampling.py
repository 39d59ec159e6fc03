"""The base classes of configurations whose runs generate, and score what they generate. Torch-free."""

from collections.abc import Sequence
from math import inf
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    model_validator,
)

from prefect_rlhf.rlhf_tasks.config.base import Groups, Judges, RunConfig
from prefect_rlhf.rlhf_tasks.config.data import RunRows
from prefect_rlhf.rlhf_tasks.config.generation import ENGINE_PAIRS, GenerationConfig
from prefect_rlhf.rlhf_tasks.config.models import (
    JUDGE,
    Role,
    RolloutModels,
)
from prefect_rlhf.rlhf_tasks.config.responses import (
    AgentConfig,
    EnvironmentConfig,
    RewardConfig,
    RewardModelScore,
    SamplingConfig,
    ToolConfig,
)
from prefect_rlhf.rlhf_tasks.config.settings import (
    MOST_SEQS,
    Pair,
)

TOOLS = "builtin:Tools"
"""The environment of a run with tools."""


class Samples(RunConfig):
    """The configuration of runs that generate."""

    groups: ClassVar[Groups] = {"": ("sampling",), "Execution": ("generation",)}
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "sampling.segment_tokens",
            "type",
            "{first}: {second} has no policy ratio that could correct for the older weights of a response's "
            "beginning. Leave it out, or choose an algorithm that has one, such as grpo or ppo.",
            lambda config: (
                config.sampling.segment_tokens is not None and "staleness" not in type(config).model_fields
            ),
        ),
        *ENGINE_PAIRS,
    )

    sampling: SamplingConfig
    generation: GenerationConfig = Field(
        default=GenerationConfig(), description="What draws responses: the built-in engine, or vLLM."
    )

    @property
    def records_kept(self) -> bool:
        """Whether samples record which tokens could be drawn: later calls must leave out the same ones."""
        return False

    @property
    def scoring_role(self) -> str:
        """The role on whose mesh scores are computed: the reward model, else the reference, else the actor."""
        roles = self.roles()
        return next(role for role in ("reward", "ref", "actor") if role in roles)


class SamplesGroups(Samples):
    """The configuration of runs that sample several responses to each prompt, which form a group."""

    groups: ClassVar[Groups] = {"Batch": ("num_generations",)}
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "num_generations",
            "batch_size",
            "{first} does not divide {second}. Make batch_size a multiple of num_generations.",
            lambda config: config.batch_size % config.num_generations,
        ),
    )

    num_generations: int = Field(
        default=1, gt=0, le=MOST_SEQS, description="Samples per prompt, which form a group."
    )

    @property
    def group_size(self) -> int:
        return self.num_generations


class Scores(Samples, Judges):
    """The configuration of runs that score what they generate, by Python functions, a reward model, or both."""

    groups: ClassVar[Groups] = {
        "": ("rewards", "environment"),
        "Tools": ("tools", "tool_format", "agent"),
        "Batch": ("chunks",),
        "Score": ("reward_model", "missing_eos_penalty"),
    }
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "sampling.segment_tokens",
            "environment.max_turn_tokens",
            "{first} and {second}: of responses of several turns a segment is a turn. Set max_turn_tokens to at most "
            "segment_tokens.",
            lambda config: (
                config.environment is not None
                and 0 < (config.sampling.segment_tokens or 0) < (config.environment.max_turn_tokens or inf)
            ),
        ),
        Pair(
            "sampling.segment_tokens",
            "environment.together",
            "{first} counts which responses have ended when all have been answered, so {second} waits for nobody in "
            "vain. Leave out one of the two.",
            lambda config: (
                config.environment is not None
                and config.sampling.segment_tokens is not None
                and not config.environment.together
            ),
        ),
        Pair(
            "sampling.segment_tokens",
            "agent.command",
            "{first} cuts responses of one turn, but those of {second} have several. Leave out one of the two.",
        ),
        Pair(
            "environment.factory",
            "agent.command",
            "{first} and {second}: both would answer the model. Leave out one of the two, tools too.",
        ),
        Pair(
            "sampling.min_new_tokens",
            "environment.max_turn_tokens",
            "{first} exceeds {second}, so no turn could end. Lower the one or raise the other.",
            lambda config: (
                config.environment
                and config.environment.max_turn_tokens is not None
                and config.sampling.min_new_tokens > config.environment.max_turn_tokens
            ),
        ),
    )

    environment: EnvironmentConfig | None = Field(
        default=None,
        description="What answers the model turn by turn, and rewards it; default: a response is one turn.",
    )
    agent: AgentConfig | None = Field(
        default=None,
        description="A program that asks the model by OpenAI's API, and may reward it, in place of an environment.",
    )
    tools: tuple[ToolConfig, ...] = Field(
        default=(),
        max_length=128,
        description="What the model may call, in at most environment.max_turns turns. Rewards judge the last turn. "
        "The rows are conversations.",
    )
    tool_format: Literal["hermes", "xml", "glm", "llama", "mistral", "harmony"] | None = Field(
        default=None,
        description="How the model writes calls of tools; default: as its chat template does.",
    )
    chunks: int = Field(
        default=1,
        gt=0,
        le=32,
        description="Equal parts into which the batch is cut: one is scored while the next is generated, on other "
        "devices.",
    )
    reward_model: RewardModelScore = Field(
        default=RewardModelScore(), description="How the reward model's score enters the sum."
    )
    missing_eos_penalty: float = Field(
        default=0.0, ge=0, description="Subtracted where a response has no end token."
    )

    @property
    def scores_tokens(self) -> bool:
        """Whether some reward judges single tokens or steps."""
        return any(reward.per != "sequence" for reward in self.scoring_rewards)

    @property
    def judged_by_a_role(self) -> RewardConfig | None:
        """The reward whose judge is a role of the run; None where there is none."""
        return next((reward for reward in self.scoring_rewards if reward.asks_a_role), None)

    @property
    def skipped_leave(self) -> bool:
        """Whether a sample that a reward fails on leaves the batch; else it is judged as 0."""
        return True

    @property
    def score_names(self) -> list[str]:
        """The names, in metrics, of everything that contributes to a score, except the reward model."""
        own = [] if self.rewarding_environment is None else [self.rewarding_environment.name]
        return [*(reward.name for reward in self.scoring_rewards), *own]

    @property
    def played(self) -> EnvironmentConfig | AgentConfig | None:
        """What the policy plays with, turn by turn; None where a response is one turn."""
        return self.environment or self.agent

    @property
    def rewarding_environment(self) -> EnvironmentConfig | AgentConfig | None:
        """The same, where it gives rewards: the environment of tools gives none, nor does a rollout_func beside
        rewards, which get its fields."""
        is_for_rewards = self.agent is not None and self.agent.rollout and self.scoring_rewards
        return None if self.tools or is_for_rewards else self.played

    @model_validator(mode="before")
    @classmethod
    def _tools_are_an_environment(cls, document: Any) -> Any:
        if not isinstance(document, dict) or not document.get("tools"):
            return document
        environment = document.get("environment") or {}
        if not isinstance(environment, dict):
            return document
        return {**document, "environment": {"factory": TOOLS, **environment}}

    @model_validator(mode="after")
    def _tools_go_together(self) -> Self:
        factory = self.environment and self.environment.factory
        if bool(self.tools) != (factory == TOOLS):
            raise ValueError(
                f"tools and environment.factory={factory}: tools answer the turns themselves. Leave out one of both."
                if self.tools
                else f"environment.factory={TOOLS}: name the tools in tools."
            )
        if self.tool_format is not None and not (self.tools or self.agent):
            raise ValueError(
                f"tool_format={self.tool_format} has no meaning without tools or an agent. Leave it out."
            )
        return self

    @model_validator(mode="after")
    def _parts_are_whole_groups(self) -> Self:
        groups = self.batch_size // self.group_size
        if groups % self.chunks:
            what = (
                f"batch_size={groups}" if self.group_size == 1 else f"batch_size / num_generations = {groups}"
            )
            raise ValueError(
                f"chunks={self.chunks} does not divide {what}, so its parts would not be equal. "
                "Choose a number that does, or 1."
            )
        return self

    @model_validator(mode="after")
    def _judge_is_there(self) -> Self:
        asked, there = self.judged_by_a_role is not None, JUDGE in self.roles()
        if asked and not there:
            raise ValueError(
                "rewards: builtin:judge names neither kwargs.url, a service, nor a model of the run. Give one of url "
                "and models.judge."
            )
        if there and not asked:
            raise ValueError(
                "models.judge: no reward asks it. Add {function: builtin:judge} without url to rewards, or leave it "
                "out."
            )
        return self

    @model_validator(mode="after")
    def _refuse_equal_names(self) -> Self:
        refuse_equal_names(self.score_names)
        return self


class OnePass(Scores, SamplesGroups):
    """The configuration of runs that answer all rows once, in file order, with a frozen model."""

    models: RolloutModels

    def samples(self, n_rows: int) -> int:
        """The number of samples of `n_rows` rows. The last iteration may have more: it begins the rows again."""
        return n_rows * self.num_generations

    def iterations(self, n_rows: int) -> int:
        """The number of iterations that pass once over all rows."""
        return -(-self.samples(n_rows) // self.batch_size)

    def row_of(self, rows: RunRows, sample: int) -> int:
        """The index of the row of a sample: rows in file order, `num_generations` samples each."""
        return sample // self.num_generations % len(rows)

    def roles(self) -> dict[str, Role]:
        """The frozen actor, and the models that judge."""
        return {"actor": Role.of(self.models.actor, "lm")} | self.models.judges

    @model_validator(mode="after")
    def _rewards_have_one_use(self) -> Self:
        if any(reward.used_in != "both" for reward in self.rewards):
            raise ValueError(f"rewards: a run of type {self.type!r} uses all of them. Leave used_in out.")
        return self


def refuse_equal_names(names: Sequence[str]) -> None:
    """Raises ValueError where two rewards would have one name in metrics."""
    if len(set(names)) != len(names):
        raise ValueError(f"two rewards share a name: {', '.join(names)}. Rename one of the functions.")
