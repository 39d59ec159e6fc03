"""Sections of how responses are drawn, in training and in evaluations. Torch-free."""

from typing import Any, Self

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from rlhf_tasks.config.settings import MOST_ITERATIONS, MOST_SEQS, MOST_TOKENS, Settings
from rlhf_tasks.system.reading import shown

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
        description="Draw responses in segments of so many tokens, until enough have ended to fill the batch; the "
        "others continue in the next iteration, with its weights. Default: each response is drawn to its "
        "end.",
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
        description="Least tokens of a response: before these, no end token is drawn, and no stop string ends it.",
    )
    stop: tuple[int | str, ...] = Field(
        default=(),
        max_length=2 * MOST_STOPS,
        description="What ends a response besides the model's own end tokens: strings, and tokens by their ids. The "
        "token that completes a string is its last token and stays whole.",
    )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end a response besides the model's own end tokens."""
        return tuple(each for each in self.stop if isinstance(each, int))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a response."""
        return tuple(each for each in self.stop if isinstance(each, str))

    @field_validator("stop", mode="before")
    @classmethod
    def _strings_and_ids(cls, value: Any) -> Any:
        """Ids and strings sorted, each once: the order in which they are named does not make another run."""
        several = [value] if isinstance(value, int | str) else value
        if not isinstance(several, list | tuple):
            raise ValueError(f"give strings and ids of tokens, found {shown(value)}")
        for each in several:
            is_id = isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31
            if not (is_id or (isinstance(each, str) and each)):
                raise ValueError(f"give strings and ids of tokens, from 0 on, found {shown(each)}")
        return (
            *sorted({each for each in several if isinstance(each, int)}),
            *sorted({each for each in several if isinstance(each, str)}),
        )

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
                f"the strings in stop have {size} bytes together, more than {MOST_STOP_BYTES}. Name fewer or shorter "
                "ones."
            )
        return self


class EvaluationConfig(Settings):
    """Evaluation on held-out rows during a training run: the model as it then is answers them, and the answers are
    scored by the run's rewards; or it is asked how likely the rows' own completions are.
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
