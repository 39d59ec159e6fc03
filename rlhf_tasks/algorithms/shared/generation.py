"""The generate call of every algorithm that samples from its policy; responses of several turns.

Where the run has an environment, the policy draws a turn, the environment answers, and so on until it says that it is
over. The turns of a dp rank's sequences are drawn together: all draw, all are answered at once, and those that
continue are drawn from again, their contexts filled anew. A sequence depends only on (seed, iteration, sample id,
weights, row), neither on the sequences beside it nor on the order in which environments answer. Only the head talks
to environments; a broadcast gives the other ranks of its replica the contexts to draw from next.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.shared.agents import COUNTS, play_agents
from prefect_rlhf.rlhf_tasks.algorithms.shared.answers import asking_early
from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import PolicyConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import (
    AGENT_COUNTS,
    DRAWN_BY,
    ENVIRONMENT_FAULT,
    ENVIRONMENT_REWARDS,
    TOOL_CALLS,
)
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.responses import SamplingConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Samples, Scores
from prefect_rlhf.rlhf_tasks.data.tokenizer import Observations, Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.batch.redistribution import share_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams, StopStrings
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.counter_random import counter_bits
from prefect_rlhf.rlhf_tasks.user_code.environments import observed
from prefect_rlhf.rlhf_tasks.user_code.episodes import Answer, Episode, FailedAnswer
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError, shortened
from prefect_rlhf.rlhf_tasks.user_code.tools.episode import OUTCOMES


def actor_generate(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Sample responses to `prompt_ids`: `input_ids`, `response_mask`, `old_logprobs` and `truncated`; where the
    configuration `records_kept`, also `kept_counts` and `kept_tokens`; where it draws ahead, also `drawn_by`; where
    an environment answers, also `environment_rewards` (see `draw`).

    A response depends only on (seed, iteration, sample id, weights, prompt), not on the layout and micro-batches.
    Metrics, of all parts of the call: completions/mean_length in tokens, completions/clipped_ratio (fraction of
    truncated responses), throughput/tokens_per_s (response tokens of all dp ranks per second); with tools
    tools/calls, tools/malformed and tools/failed, with an agent agent/requests, agent/refused and agent/left_out, per
    response.
    """
    config = context.config
    assert isinstance(config, Samples), f"{config.type} runs do not generate"
    output = respond(engine, batch, context, config.sampling, config.records_kept)
    if output.batch is None or not isinstance(config, PolicyConfig) or not config.staleness:
        return output
    mask = output.batch["response_mask"]
    version = torch.where(mask.values, context.generator.version, -1)
    drawn = {**output.batch.data, DRAWN_BY: Packed(version, mask.lengths)}
    return CallOutput(SampleBatch(output.batch.ids, drawn), output.metrics)


def respond(
    engine: Engine, batch: SampleBatch, context: CallContext, settings: SamplingConfig, record_kept: bool
) -> CallOutput:
    """As `actor_generate`, with these settings of sampling.

    record_kept  whether to record which tokens could be drawn
    """
    sampling = sampling_params(settings, context.tokenizer)
    started = time.perf_counter()
    answered = draw(engine, batch, context, sampling, record_kept)
    elapsed_s = time.perf_counter() - started
    key, names = _counted(context.config)
    mine = torch.zeros(5 + len(names), dtype=torch.float64)
    if answered is not None:
        mine[0] = len(answered)
        mine[1] = answered["response_mask"].values.sum()
        mine[2] = answered["truncated"].values.sum()
        mine[3] = elapsed_s
        mine[4] = 1
        if names:
            mine[5:] = answered[key].values.view(-1, len(names)).sum(0)
    return CallOutput(answered, generation_metrics(context.all_parts(engine.sum_over_dp(mine)), names))


def _counted(config: RunConfig) -> tuple[str, Sequence[str]]:
    """(the key of what else is counted of a response, the names of its metrics)"""
    if isinstance(config, Scores) and config.tools:
        return TOOL_CALLS, [f"tools/{name}" for name in OUTCOMES]
    if isinstance(config, Scores) and config.agent:
        return AGENT_COUNTS, [f"agent/{name}" for name in COUNTS]
    return "", ()


def generation_metrics(parts: Sequence[Tensor] | None, names: Sequence[str] = ()) -> dict[str, float]:
    """The metrics of generation, from sums over the dp ranks of each part: [5] float64 responses, their tokens, those
    truncated, seconds, dp ranks; then what else is counted, by the names of its metrics. None where further parts
    follow: there are none yet, as there are none where no part has run."""
    if parts is None:
        return {}
    figures = torch.stack(list(parts))
    responses, tokens, clipped, _, _, *counts = figures.sum(0).tolist()
    if not responses:
        return {}
    seconds = (figures[:, 3] / figures[:, 4].clamp(min=1)).sum().item()
    return {
        "completions/mean_length": tokens / responses,
        "completions/clipped_ratio": clipped / responses,
        "throughput/tokens_per_s": tokens / seconds,
        **{name: count / responses for name, count in zip(names, counts, strict=True)},
    }


def sampling_params(settings: SamplingConfig, tokenizer: Tokenizer) -> SamplingParams:
    """The engine's sampling parameters from a configuration's."""
    return SamplingParams(
        max_new_tokens=settings.max_completion_length,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_new_tokens=settings.min_new_tokens,
        stop_ids=tuple(dict.fromkeys((*tokenizer.stop_ids, *settings.stop_token_ids))),
        stop_strings=_stop_strings(tokenizer, settings.stop_strings) if settings.stop_strings else None,
    )


@lru_cache(
    maxsize=8
)  # a run's, its evaluation's, agents': a table takes a second for a vocabulary of 150,000
def _stop_strings(tokenizer: Tokenizer, strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings, tokenizer.texts())


def draw(
    engine: Engine,
    batch: SampleBatch,
    context: CallContext,
    sampling: SamplingParams,
    record_kept: bool = False,
    purpose: str = "rollout",
) -> SampleBatch | None:
    """Responses to `prompt_ids`, as the generator returns them; of several turns where the run has an environment, or
    an agent (agents.py).

    Then `max_new_tokens` counts all that is after the prompt, observations too. `response_mask` is False on
    observations, and `old_logprobs` are 0 there. `truncated` says that the environment had not ended the episode. A
    response ends with a token that was drawn: an observation after which no token or no turn is left is not part of
    it. There is one key more: `environment_rewards` [1] float64, the sum of the environment's rewards; with tools
    also `tool_calls` [3] int64, numbers of calls by OUTCOMES, and `truncated` where the last turn was.
    Collective over the replica. Raises RewardError, naming the sample, where the environment fails. With
    `on_reward_error: skip` such a response ends with the turn that has no answer, and says why under a further key,
    `environment_fault`: text, empty where nothing failed.
    """
    config = context.config
    strings = config.sampling.stop_strings if isinstance(config, Samples) else ()
    order = Order(
        sampling, config.seed, context.iteration, purpose, strings, record_kept, context.micro_batches
    )
    context.generator.take(engine)
    if isinstance(config, Scores) and config.agent is not None:
        return play_agents(engine, batch, context, order, _stop_strings)
    if not isinstance(config, Scores) or config.environment is None:
        on_ended = asking_early(batch, context) if engine.is_head else None
        return context.generator.draw(batch, order._replace(on_ended=on_ended))
    environment = config.environment
    lengths = dict(zip(batch.ids, batch["prompt_ids"].lengths, strict=True))
    table = _Dialogues(batch, context, config, sampling, purpose, engine) if engine.is_head else None
    waiting = batch
    for number in range(environment.max_turns):
        contexts = zip(waiting.ids, waiting["prompt_ids"].lengths, strict=True)
        room = max(
            (sampling.max_new_tokens - length + lengths[sample] for sample, length in contexts), default=1
        )
        most = min(room, environment.max_turn_tokens or room)
        turn = replace(sampling, max_new_tokens=most, min_new_tokens=min(sampling.min_new_tokens, most))
        drawn = context.generator.draw(waiting, order._replace(params=turn))
        following = None
        if table is not None:
            assert drawn is not None, "this rank is a head"
            following = table.answered(drawn, is_last=number + 1 == environment.max_turns)
        waiting = share_batch(following, engine.placement, engine.groups)
        if not len(waiting):
            break
    return None if table is None else table.samples()


class _Sequence:
    """A sample on its head, as it grows.

    parts      key -> its tensors, one for each turn and observation, and for the prompt
    is_cut     whether its last turn did not end
    room       tokens that may still come
    texts      of its turns
    reward     sum of the environment's
    truncated  whether the environment has not ended it
    fault      how the environment has failed; "" where it has not
    calls      of tools, by OUTCOMES
    """

    def __init__(
        self, prompt: Tensor, row: Mapping[str, Any], seed: int, most: int, dtype: torch.dtype
    ) -> None:
        self.parts: dict[str, list[Tensor]] = {}
        self.row, self.seed, self.room, self._dtype = row, seed, most, dtype
        self.texts: list[str] = []
        self.reward, self.truncated, self.fault = 0.0, True, ""
        self.is_cut, self.calls = False, Counter[str]()
        self._add_read(prompt)

    @property
    def context(self) -> Tensor:
        """All its tokens: [L] int64."""
        return torch.cat(self.parts["input_ids"])

    def _add(self, **data: Tensor) -> None:
        for key, part in data.items():
            self.parts.setdefault(key, []).append(part)

    def _add_read(self, ids: Tensor) -> None:
        none = torch.zeros(len(ids), dtype=self._dtype)
        self._add(
            input_ids=ids,
            response_mask=none.bool(),
            old_logprobs=none,
            kept_counts=none.int(),
            kept_tokens=none[:0].int(),
        )

    def observe(self, ids: Sequence[int]) -> None:
        """Add an observation."""
        self.room -= len(ids)
        self._add_read(torch.tensor(ids, dtype=torch.int64))

    def draw(self, data: Mapping[str, Tensor]) -> Tensor:
        """Add the tokens drawn after the context, as many as there is room for. Returns them.

        data  of the context and these tokens, by the keys of `generate`
        """
        start = sum(len(part) for part in self.parts["input_ids"])
        stop = min(len(data["input_ids"]), start + self.room)
        self.room -= stop - start
        new = {key: data[key][start:stop] for key in ("input_ids", "response_mask", "old_logprobs")}
        if "kept_counts" in data:
            new["kept_counts"] = data["kept_counts"][start:stop]
            new["kept_tokens"] = data["kept_tokens"][: int(new["kept_counts"].abs().sum())]
        self._add(**new)
        return new["input_ids"]


class _Dialogues:
    """The sequences of a head, which its environments answer."""

    def __init__(
        self,
        batch: SampleBatch,
        context: CallContext,
        config: Scores,
        sampling: SamplingParams,
        purpose: str,
        engine: Engine,
    ) -> None:
        self._context, self._config, self._engine = context, config, engine
        self._observations = Observations(context.tokenizer)
        self._nothing: dict[str, Tensor] = {}  # key -> a tensor without rows
        dtype = torch.promote_types(engine.stage.dtype, torch.float32)
        seeds = counter_bits(
            config.seed,
            f"environment/{purpose}",
            context.iteration,
            torch.tensor(batch.ids, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
        ).tolist()
        prompts, rows = batch["prompt_ids"].to(torch.device("cpu")).split(), batch["columns"].texts()
        self._sequences = {
            sample: _Sequence(prompt, json.loads(row), seed, sampling.max_new_tokens, dtype)
            for sample, prompt, row, seed in zip(batch.ids, prompts, rows, seeds, strict=True)
        }

    def answered(self, drawn: SampleBatch, is_last: bool) -> SampleBatch:
        """Add what was drawn, and what environments answer. Returns what is to be drawn from next."""
        data = drawn.to(torch.device("cpu")).data
        self._nothing = {key: packed.values[:0] for key, packed in data.items() if key != "truncated"}
        parts = {key: data[key].split() for key in self._nothing}
        last: dict[int, int] = {}
        for place, sample in enumerate(drawn.ids):
            sequence, whole = self._sequences[sample], {key: of_all[place] for key, of_all in parts.items()}
            new = sequence.draw(whole).tolist()
            length = sum(map(len, sequence.parts["input_ids"]))
            sequence.is_cut = bool(data["truncated"].values[place]) or length < len(whole["input_ids"])
            sequence.texts.append(self._said(new))
            last[sample] = new[-1]
        following = [
            sample
            for sample, answer in zip(drawn.ids, self._answers(drawn.ids), strict=True)
            if self._continues(sample, answer, last[sample], is_last)
        ]
        contexts = [self._sequences[sample].context for sample in following]
        values = torch.cat([torch.zeros(0, dtype=torch.int64), *contexts]).to(self._engine.device)
        packed = Packed(values, tuple(len(context) for context in contexts))
        return SampleBatch(tuple(following), {"prompt_ids": packed})

    def _said(self, ids: Sequence[int]) -> str:
        """The text of a turn. Where it may call tools, it has its special tokens, but not the one that ends it."""
        tokenizer = self._context.tokenizer
        if not self._config.tools:
            return tokenizer.decode(ids)
        return tokenizer.decode(ids[:-1] if ids[-1] in tokenizer.stop_ids else ids, special_tokens=True)

    def _answers(self, samples: Sequence[int]) -> list[Answer | FailedAnswer]:
        if not samples:
            return []
        at = self._sequences
        episodes = [Episode(each, at[each].row, at[each].seed, at[each].texts) for each in samples]
        try:
            assert self._context.environment is not None, "the rank has no environment process"
            return self._context.environment.answers(episodes)
        except RewardError as error:
            raise RewardError(f"{error}{self._about(error.place)}", error.traceback) from None

    def _about(self, sample: int | None) -> str:
        """A sentence about the sample on which the environment failed: its number, its row, its last turn."""
        if sample is None:
            return ""
        texts = self._sequences[sample].texts
        said = json.dumps(shortened(texts[-1], 100), ensure_ascii=False)
        return (
            f" It was at sample {sample} ({self._context.where(sample)}), whose turn {len(texts)} was {said}."
        )

    def _continues(self, sample: int, answer: Answer | FailedAnswer, last: int, is_last: bool) -> bool:
        """Take an answer. Returns whether the policy draws another turn; then the observation is added before it."""
        sequence = self._sequences[sample]
        if isinstance(answer, FailedAnswer):
            sequence.fault = answer.reason
            return False
        sequence.reward += answer.reward
        sequence.truncated = not answer.done or (bool(self._config.tools) and sequence.is_cut)
        if answer.done:
            return False
        if not isinstance(answer.observation, str):
            sequence.calls.update(each["outcome"] for each in answer.observation)
        try:
            prompt = sequence.row.get("prompt")
            ids = observed(self._observations, self._config, answer.observation, prompt, last)
        except RewardError as error:
            if self._config.on_reward_error != "skip":
                raise RewardError(f"{error}{self._about(sample)}") from None
            sequence.fault = str(error)
            return False
        if is_last or len(ids) >= sequence.room:
            return False
        sequence.observe(ids)
        return True

    def samples(self) -> SampleBatch:
        """All sequences, by the keys of `draw`."""
        made, device = list(self._sequences.values()), self._engine.device
        data = {}
        for key, nothing in self._nothing.items():
            whole = [torch.cat(sequence.parts[key]) for sequence in made]
            data[key] = Packed(torch.cat([nothing, *whole]).to(device), tuple(map(len, whole)))
        one = (1,) * len(made)
        truncated = torch.tensor([each.truncated for each in made], dtype=torch.bool, device=device)
        rewards = torch.tensor([each.reward for each in made], dtype=torch.float64, device=device)
        data |= {"truncated": Packed(truncated, one), ENVIRONMENT_REWARDS: Packed(rewards, one)}
        if self._config.tools:
            calls = [
                count for each in made for count in (each.calls.total(), *map(each.calls.get, OUTCOMES[1:]))
            ]
            numbers = torch.tensor([count or 0 for count in calls], dtype=torch.int64, device=device)
            data[TOOL_CALLS] = Packed(numbers, (len(OUTCOMES),) * len(made))
        if self._config.on_reward_error == "skip":
            faults = [each.fault.encode(errors="backslashreplace") for each in made]
            text = torch.tensor(list(b"".join(faults)), dtype=torch.uint8, device=device)
            data[ENVIRONMENT_FAULT] = Packed(text, tuple(map(len, faults)))
        return SampleBatch(tuple(self._sequences), data)
