"""Sections of how responses are drawn, in training and in evaluations. Torch-free."""

from typing import Annotated, Any, Self

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from rlhf_tasks.config.rewards import Reward
from rlhf_tasks.config.settings import MOST_ITERATIONS, MOST_SEQS, MOST_TOKENS, Settings

MOST_STOPS = 32  # strings, and ids, that end a response
MOST_STOP_BYTES = 256  # of all stop strings: the table that finds them has a row for each


class SamplingConfig(Settings):
    """How responses are sampled."""

    max_completion_length: int = Field(
        gt=0, le=MOST_TOKENS, description="Maximum tokens of a response, including the end token."
    )
    segment_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Tokens of each response that are drawn before ended ones are counted, until they make a batch; "
        "the others go on in the next iteration, with its weights; default: each response is drawn to its end.",
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
        min_length=1,
        description="Held-out rows: JSONL (.gz), JSON, CSV or Parquet, read as those of data.train are.",
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
