"""What one iteration processes: sequence lengths, passes over the data, bytes per number."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Self

from pydantic import Field, model_validator

from prefect_rlhf.rlhf_tasks.config.models import JUDGE, JUDGE_REPLIES
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head, ModelShape, Recompute
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement
from prefect_rlhf.rlhf_tasks.spec import Frozen, ModelFunctionCall, SavedShape

PARTS = 32
"""The most points of a distribution of lengths that is made from data."""


class Lengths(Frozen):
    """A distribution of lengths in tokens: (length, share of the sequences) pairs; shares add up to 1."""

    points: tuple[tuple[int, float], ...] = Field(min_length=1)

    @staticmethod
    def fixed(tokens: int) -> "Lengths":
        """The distribution in which every sequence has `tokens` tokens."""
        return Lengths(points=((tokens, 1.0),))

    @staticmethod
    def of(tokens: Sequence[int]) -> "Lengths":
        """The distribution of some lengths, in at most PARTS points: means of equal numbers of lengths."""
        ordered = sorted(max(1, length) for length in tokens)
        parts = min(PARTS, len(ordered))
        cuts = [len(ordered) * part // parts for part in range(parts + 1)]
        shares = Counter[int]()
        for start, stop in pairwise(cuts):
            shares[round(sum(ordered[start:stop]) / (stop - start))] += stop - start
        return Lengths(points=tuple((length, n / len(ordered)) for length, n in shares.items()))

    @model_validator(mode="after")
    def _is_distribution(self) -> Self:
        if any(tokens < 1 or share < 0 for tokens, share in self.points):
            raise ValueError("lengths: every length is at least 1 token, and no share is negative.")
        total = sum(share for _, share in self.points)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"lengths: the shares add up to {total:g}, not to 1.")
        return self

    @cached_property
    def mean(self) -> float:
        """Mean length in tokens."""
        return sum(tokens * share for tokens, share in self.points)

    @property
    def longest(self) -> int:
        """The largest length in tokens that has a share."""
        return max(tokens for tokens, share in self.points if share > 0)

    def spans(self) -> list[tuple[int, int, float]]:
        """Spans of decoding steps in which no sequence ends: (first step, last step, share of sequences that still
        run)."""
        spans, start, running = list[tuple[int, int, float]](), 1, 1.0
        for tokens, share in sorted(self.points):
            if share > 0:
                spans.append((start, tokens, running))
                start, running = tokens + 1, running - share
        return spans


class EvaluationWork(Frozen):
    """The evaluation of a trained role: what it computes, and how often.

    every              iterations from one evaluation to the next
    rows               held-out rows; rows_at_once: of these, computed at once by all dp ranks together
    answers            answers that are generated to each row; 0: none
    prompt_tokens      mean tokens of a held-out prompt
    new_tokens         most tokens of an answer
    completion_tokens  mean tokens of a row with its completion, on which the loss is computed; 0: it is not
    """

    every: int = Field(gt=0)
    rows: int = Field(gt=0)
    rows_at_once: int = Field(gt=0)
    answers: int = Field(0, ge=0)
    prompt_tokens: int = Field(1, gt=0)
    new_tokens: int = Field(1, gt=0)
    completion_tokens: int = Field(0, ge=0)


class OtherEngine(Frozen):
    """An engine beside the ranks that draws for them (docs/adr/0028-generators.md).

    copies    whole models in the memory of a replica's host: the memory by which weights are handed over, and the
              engine's own, or the file's. On GPUs an engine has its weights and reads ours there
    kv_bytes  of its keys and values on each device; None: it is on another machine, and divides its model as it likes
    """

    copies: int = Field(ge=1)
    kv_bytes: int | None = Field(default=None, gt=0)

    def divides(self, shape: ModelShape, ranks: int) -> bool:
        """Whether it can divide the heads and the columns of a model over the ranks of a replica."""
        of_keys = shape.kv_heads
        cut = (shape.query_heads, shape.intermediate, shape.shared_columns, shape.dense_columns)
        evenly = max(of_keys, ranks) % min(of_keys, ranks) == 0 and not any(each % ranks for each in cut)
        return self.kv_bytes is None or evenly

    def draws_on(self, placement: Placement, devices_per_host: int) -> bool:
        """Whether each replica of a placement is on one host: only there its head can read all its weights."""
        replicas = map(placement.replica, range(placement.strategy.dp))
        return all(min(each) // devices_per_host == max(each) // devices_per_host for each in replicas)


class Thinking(Frozen):
    """For how long environments keep the sequences of a rank waiting (docs/adr/0042-turns-apart.md).

    together   no sequence continues before all have been answered
    mean_s     seconds in which all turns of a response are answered
    longest_s  the same of the longest of `among` responses; where all wait for all, of the longest answer to each
               turn, added up
    among      1: all take as long
    """

    together: bool = True
    mean_s: float = Field(default=0.0, ge=0)
    longest_s: float = Field(default=0.0, ge=0)
    among: int = Field(default=1, gt=0)

    def longest_of(self, responses: float) -> float:
        """The same as `longest_s` of so many responses: it grows with their logarithm, as the longest of times that
        are distributed exponentially does."""
        if self.among == 1:
            return self.longest_s
        spread_s = (self.longest_s - self.mean_s) / math.log(self.among)
        return self.mean_s + spread_s * math.log(max(responses, 1.0))


class JudgeWork(Frozen):
    """What the judge reads and draws for a sample.

    prompt_tokens  mean tokens of a question: its template, the prompt and the response
    longest        tokens of the longest question
    new_tokens     most tokens of a reply
    questions      about a sample
    """

    prompt_tokens: int = Field(gt=0)
    longest: int = Field(gt=0)
    new_tokens: int = Field(gt=0)
    questions: int = Field(1, gt=0)


class Workload(Frozen):
    """Sizes of an iteration, in addition to those in the graph.

    prompt_tokens    tokens of a prompt
    prompt_lengths   their distribution, from which only `balance` is chosen; None: all are alike
    longest_prompt   tokens of the longest prompt, for which the KV cache has room; None: all are alike
    new_tokens       distribution of the tokens that are generated
    max_new_tokens   generated tokens per sequence that the KV cache has room for; default: the longest of new_tokens
    thinking         of the environments that answer turns; None: there are none
    agents           whether agents ask for responses: in the KV cache each has room for a prompt of its own
    answers          sequences of a sample: 2 for a pair of answers. A length is that of all of them together
    shared_tokens    mean first tokens that a pair's answers have in common, and that are computed once
    top_k, top_p     whether tokens are drawn from the likeliest only
    counted_tokens   mean tokens of a sequence that pass a language model's head in training and inference; None: all
    epochs           passes of a train_step over the batch
    itemsize         bytes of a parameter or activation
    recompute        which activations of a layer its backward pass computes again
    micro_batch_tokens  most tokens of a micro-batch in training and inference; None: no limit
    reward_s         seconds of the Python rewards per sequence
    evaluation       of the role that the graph has evaluated
    sync_every       iterations from one blend to the next of a role that follows another
    other            that draws instead of the ranks; None: they do
    judge            of the role that grades responses by its replies; None: there is none
    """

    prompt_tokens: int = Field(gt=0)
    prompt_lengths: Lengths | None = None
    longest_prompt: int | None = Field(None, gt=0)
    new_tokens: Lengths
    max_new_tokens: int | None = Field(None, gt=0)
    thinking: Thinking | None = None
    agents: bool = False
    answers: int = Field(1, gt=0)
    shared_tokens: float = Field(0.0, ge=0)
    top_k: bool = False
    top_p: bool = False
    counted_tokens: float | None = Field(None, gt=0)
    epochs: int = Field(1, gt=0)
    itemsize: int = Field(gt=0)
    recompute: Recompute
    micro_batch_tokens: int | None = Field(None, gt=0)
    reward_s: float = Field(0.0, ge=0)
    evaluation: EvaluationWork | None = None
    sync_every: int = Field(1, gt=0)
    other: OtherEngine | None = None
    judge: JudgeWork | None = None

    def of_role(self, role: str) -> "Workload":
        """The workload of a role's calls: the judge reads questions, each with one response; our own engine draws its
        replies."""
        if role != JUDGE or self.judge is None:
            return self
        of_judge = {
            "prompt_tokens": self.judge.prompt_tokens,
            "prompt_lengths": None,
            "longest_prompt": self.judge.longest,
            "new_tokens": Lengths.fixed(self.judge.new_tokens),
            "max_new_tokens": None,
            "thinking": None,
            "agents": False,
            "top_k": False,
            "top_p": False,
            "other": None,
        }
        return self.model_copy(update=of_judge)

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a sequence, prompt included."""
        return self.prompt_tokens + self.new_tokens.mean

    @property
    def counted_share(self) -> float:
        """Share of the tokens that pass a language model's head in training and inference."""
        return 1.0 if self.counted_tokens is None else min(1.0, self.counted_tokens / self.mean_tokens)

    @property
    def longest_response(self) -> int:
        """Generated tokens per sequence that the KV cache has room for."""
        return self.max_new_tokens or self.new_tokens.longest

    @property
    def cache_tokens(self) -> int:
        """Tokens per sequence that the KV cache has room for."""
        return (self.longest_prompt or self.prompt_tokens) + self.longest_response


def fullest_share(call: ModelFunctionCall, dp: int) -> int:
    """The most sequences of a (mini-)batch or part that a dp rank gets, if dealt by count; so it can have at most
    this many micro-batches."""
    fullest_batch = -(-call.n_groups // call.blocks)
    return -(-fullest_batch // dp) * call.group_size


def least_share(call: ModelFunctionCall, dp: int) -> int:
    """The sequences of a (mini-)batch or part that every dp rank gets at least, if dealt by count."""
    return call.n_groups // (call.blocks * dp) * call.group_size


_TOKEN_BYTES = {
    "prompt_ids": 8,
    "input_ids": 8,
    "response_mask": 1,
    "drawn_by": 8,
    "greedy_input_ids": 8,
    "greedy_response_mask": 1,
    "chosen_ids": 4,  # half of a pair's tokens
    "rejected_ids": 4,
    "chosen_mask": 0.5,
    "rejected_mask": 0.5,
    "mismatched_ids": 8,
    "mismatched_mask": 1,
}
"""Bytes per token of the keys that are not float32 per token (docs/architecture.md)."""

_SAMPLE_BYTES = {
    "scores": 4,
    "stays": 1,
    "truncated": 1,
    "environment_rewards": 8,
    "tool_calls": 24,
    "answered_turns": 64,  # of four turns
    "agent_counts": 32,
    "agent_columns": 64,  # a text
    "sequence_lengths": 16,  # of the few sequences that an agent's sample mostly has
    "environment_fault": 1,  # a text, but of few samples
    "number": 8,
    "greedy_scores": 4,
    "greedy_stays": 1,
    "greedy_truncated": 1,
    "final_values": 4,
    "margin": 8,
    "desirable": 1,
    "ref_chosen_logps": 4,
    "ref_rejected_logps": 4,
    "ref_logps": 4,
    "ref_mismatched_logps": 4,
}
"""Bytes per sample of the keys that have one row per sample."""

COLUMN_BYTES = 4  # of `columns`, per prompt token: the prompt's text, and as much again for the other columns


def key_bytes(key: str, workload: Workload) -> float:
    """Mean bytes of a key per sample."""
    if key in _SAMPLE_BYTES:
        return _SAMPLE_BYTES[key]
    if key in ("columns", "columns_of_number"):
        return COLUMN_BYTES * workload.prompt_tokens
    if key.endswith(JUDGE_REPLIES):
        return (
            0
            if workload.judge is None
            else COLUMN_BYTES * workload.judge.new_tokens * workload.judge.questions
        )
    tokens = workload.prompt_tokens if key == "prompt_ids" else workload.mean_tokens
    return _TOKEN_BYTES.get(key, 4) * tokens


class RoleModel(Frozen):
    """The model behind a role.

    lora     the adapters that train instead of the model; None where all of it trains, or nothing
    weights  names the model's initial weights: on one placement, roles share those that are frozen and have the same
             name; "": not shared
    """

    shape: SavedShape
    head: Head = "lm"
    lora: Lora | None = None
    weights: str = ""
