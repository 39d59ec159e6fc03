"""Responses of several turns: the policy draws one, an environment answers, and so on until it says that it is over.

The turns of a dp rank's sequences are drawn together: all draw, all are answered at once, and those that continue are
drawn from again, their contexts filled anew. A sequence depends only on (seed, iteration, sample id, weights, row),
neither on the sequences beside it nor on the order in which environments answer. Only the head talks to
environments; a broadcast gives the other ranks of its replica the contexts to draw from next.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf_tasks.algorithms.shared.context import CallContext
from rlhf_tasks.algorithms.shared.graphs import ENVIRONMENT_FAULT, ENVIRONMENT_REWARDS
from rlhf_tasks.config.base import Scores
from rlhf_tasks.data.tokenizer import Observations
from rlhf_tasks.parallel.batch.redistribution import share_batch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.generate.generation import generate
from rlhf_tasks.parallel.generate.sampling import SamplingParams
from rlhf_tasks.parallel.train.engine import Engine
from rlhf_tasks.system.counter_random import counter_bits
from rlhf_tasks.user_code.environments import observed
from rlhf_tasks.user_code.episodes import Answer, Episode, FailedAnswer
from rlhf_tasks.user_code.errors import RewardError, shortened


def draw(
    engine: Engine,
    batch: SampleBatch,
    context: CallContext,
    sampling: SamplingParams,
    record_kept: bool = False,
    purpose: str = "rollout",
) -> SampleBatch | None:
    """Responses to `prompt_ids`, as `generate` returns them; of several turns where the run has an environment.

    Then `max_new_tokens` counts all that is after the prompt, observations too. `response_mask` is False on
    observations, and `old_logprobs` are 0 there. `truncated` says that the environment had not ended the episode. A
    response ends with a token that was drawn: an observation after which no token or no turn is left is not part of
    it. There is one key more: `environment_rewards` [1] float64, the sum of the environment's rewards.
    Collective over the replica. Raises RewardError, naming the sample, where the environment fails. With
    `on_reward_error: skip` such a response ends with the turn that has no answer, and says why under a further key,
    `environment_fault`: text, empty where nothing failed.
    """
    config = context.config
    one_turn = (config.seed, context.iteration, purpose, None, record_kept, context.micro_batches)
    if not isinstance(config, Scores) or config.environment is None:
        return generate(engine, batch, sampling, *one_turn)
    environment = config.environment
    lengths = dict(zip(batch.ids, batch["prompt_ids"].lengths, strict=True))
    table = _Dialogues(batch, context, config, sampling, purpose, engine) if engine.is_head else None
    waiting = batch
    for number in range(environment.max_turns):
        behind = zip(waiting.ids, waiting["prompt_ids"].lengths, strict=True)
        room = max(
            (sampling.max_new_tokens - length + lengths[sample] for sample, length in behind), default=1
        )
        most = min(room, environment.max_turn_tokens or room)
        turn = replace(sampling, max_new_tokens=most, min_new_tokens=min(sampling.min_new_tokens, most))
        drawn = generate(engine, waiting, turn, *one_turn)
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
    texts      of its turns
    reward     sum of the environment's
    truncated  whether the environment has not ended it
    fault      how the environment has failed; "" where it has not
    """

    def __init__(
        self, prompt: Tensor, row: Mapping[str, Any], seed: int, most: int, dtype: torch.dtype
    ) -> None:
        self.parts: dict[str, list[Tensor]] = {}
        self.row, self.seed, self._room, self._dtype = row, seed, most, dtype
        self.texts: list[str] = []
        self.reward, self.truncated, self.fault = 0.0, True, ""
        self._given(prompt)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still come."""
        return self._room

    @property
    def context(self) -> Tensor:
        """All its tokens: [L] int64."""
        return torch.cat(self.parts["input_ids"])

    def _add(self, **data: Tensor) -> None:
        for key, part in data.items():
            self.parts.setdefault(key, []).append(part)

    def _given(self, ids: Tensor) -> None:
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
        self._room -= len(ids)
        self._given(torch.tensor(ids, dtype=torch.int64))

    def draw(self, data: Mapping[str, Tensor]) -> Tensor:
        """Add the tokens drawn after the context, as many as there is room for. Returns them.

        data  of the context and these tokens, by the keys of `generate`
        """
        start = sum(len(part) for part in self.parts["input_ids"])
        stop = min(len(data["input_ids"]), start + self._room)
        self._room -= stop - start
        new = {key: data[key][start:stop] for key in ("input_ids", "response_mask", "old_logprobs")}
        if "kept_counts" in data:
            new["kept_counts"] = data["kept_counts"][start:stop]
            new["kept_tokens"] = data["kept_tokens"][: int(new["kept_counts"].sum())]
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
            new = self._sequences[sample].draw({key: of_all[place] for key, of_all in parts.items()}).tolist()
            self._sequences[sample].texts.append(self._context.tokenizer.decode(new))
            last[sample] = new[-1]
        following = [
            sample
            for sample, answer in zip(drawn.ids, self._answers(drawn.ids), strict=True)
            if self._goes_on(sample, answer, last[sample], is_last)
        ]
        contexts = [self._sequences[sample].context for sample in following]
        values = torch.cat([torch.zeros(0, dtype=torch.int64), *contexts]).to(self._engine.device)
        packed = Packed(values, tuple(len(context) for context in contexts))
        return SampleBatch(tuple(following), {"prompt_ids": packed})

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

    def _goes_on(self, sample: int, answer: Answer | FailedAnswer, last: int, is_last: bool) -> bool:
        """Take an answer. Returns whether the policy draws another turn; then the observation is added before it."""
        sequence = self._sequences[sample]
        if isinstance(answer, FailedAnswer):
            sequence.fault = answer.reason
            return False
        sequence.reward += answer.reward
        sequence.truncated = not answer.done
        if answer.done:
            return False
        try:
            prompt = sequence.row.get("prompt")
            ids = observed(self._observations, self._config, answer.observation, prompt, last)
        except RewardError as error:
            if self._config.on_reward_error != "skip":
                raise RewardError(f"{error}{self._about(sample)}") from None
            sequence.fault = str(error)
            return False
        if is_last or len(ids) >= sequence.tokens_left:
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
        if self._config.on_reward_error == "skip":
            faults = [each.fault.encode(errors="backslashreplace") for each in made]
            text = torch.tensor(list(b"".join(faults)), dtype=torch.uint8, device=device)
            data[ENVIRONMENT_FAULT] = Packed(text, tuple(map(len, faults)))
        return SampleBatch(tuple(self._sequences), data)
