"""The generate call of every algorithm that samples from its policy; responses of several turns.

Where the run has an environment, the policy draws a turn, the environment answers, and so on until it says that it is
over. While a sequence waits for its answer, others are drawn. A sequence depends only on (seed, iteration, sample id,
weights, row), neither on the sequences beside it nor on the order in which environments answer. Only the head talks
to environments.
"""

import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.shared.agents import COUNTS, play_agents
from prefect_rlhf.rlhf_tasks.algorithms.shared.answers import asking_early
from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import PolicyConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import (
    AGENT_COUNTS,
    ANSWERED,
    DRAWN_BY,
    ENVIRONMENT_FAULT,
    ENVIRONMENT_REWARDS,
    TOOL_CALLS,
)
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.responses import TURNS, SamplingConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Samples, Scores
from prefect_rlhf.rlhf_tasks.data.tokenizer import Observations, Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order
from prefect_rlhf.rlhf_tasks.parallel.generate.places import BEGUN
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams, StopStrings, TokenTexts
from prefect_rlhf.rlhf_tasks.parallel.generate.turn_by_turn import turn_by_turn
from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Following, Turn, Turns
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.spec import ENDED
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
    truncated responses), throughput/tokens_per_s (response tokens of all dp ranks per second); with an environment
    those of TURNS (responses.py); with tools tools/calls, tools/malformed and tools/failed, with an agent
    agent/requests, agent/refused, agent/branches and agent/left_out, per response.
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
    answered, played = draw(engine, batch, context, sampling, record_kept)
    elapsed_s = time.perf_counter() - started
    is_played = isinstance(context.config, Scores) and context.config.environment is not None
    key, counted = _counted(context.config)
    names = [*(TURNS if is_played else ()), *counted]
    mine = torch.zeros(5 + len(names), dtype=torch.float64)
    if answered is not None:
        mine[0] = len(answered)
        mine[1] = answered["response_mask"].values.sum()
        mine[2] = answered["truncated"].values.sum()
        mine[3] = elapsed_s
        mine[4] = 1
        mine[5 : 5 + len(played)] = torch.tensor(played)
        if counted:
            mine[-len(counted) :] = answered[key].values.view(-1, len(counted)).sum(0)
    return CallOutput(answered, generation_metrics(context.all_parts(engine.sum_over_dp(mine)), names))


def _counted(config: RunConfig) -> tuple[str, Sequence[str]]:
    """(the key of what else is counted of a response, the names of its metrics)"""
    if isinstance(config, Scores) and config.tools:
        return TOOL_CALLS, [f"tools/{name}" for name in OUTCOMES]
    if isinstance(config, Scores) and config.agent:
        return AGENT_COUNTS, [f"agent/{name}" for name in COUNTS]
    return "", ()


def generation_metrics(parts: Sequence[Tensor] | None, names: Sequence[str] = ()) -> dict[str, float]:
    """The metrics of generation, from sums over the dp ranks of each part: [5 + n] float64 responses, their tokens,
    those truncated, seconds, dp ranks; then what `names` names, which becomes a mean per response. None where further
    parts follow: there are none yet, as there are none where no part has run."""
    if parts is None:
        return {}
    figures = torch.stack(list(parts))
    responses, tokens, clipped, _, _, *others = figures.sum(0).tolist()
    if not responses:
        return {}
    seconds = (figures[:, 3] / figures[:, 4].clamp(min=1)).sum().item()
    return {
        "completions/mean_length": tokens / responses,
        "completions/clipped_ratio": clipped / responses,
        "throughput/tokens_per_s": tokens / seconds,
        **{name: count / responses for name, count in zip(names, others, strict=True)},
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


@lru_cache(maxsize=64)  # a run's, its evaluation's, agents'
def _stop_strings(tokenizer: Tokenizer, strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings, _token_texts(tokenizer))


@lru_cache(maxsize=1)  # they take a second or two for a vocabulary of 150,000
def _token_texts(tokenizer: Tokenizer) -> TokenTexts:
    return TokenTexts(tokenizer.texts())


class Drawn(NamedTuple):
    """What was drawn, on the head; None elsewhere. played: where environments answer, sums by TURNS"""

    batch: SampleBatch | None
    played: Sequence[float] = ()


def draw(
    engine: Engine,
    batch: SampleBatch,
    context: CallContext,
    sampling: SamplingParams,
    record_kept: bool = False,
    purpose: str = "rollout",
) -> Drawn:
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
    generator = context.generator
    generator.take(engine)
    if isinstance(config, Scores) and config.agent is not None:
        return Drawn(play_agents(engine, batch, context, order, _stop_strings))
    if not isinstance(config, Scores) or config.environment is None:
        on_ended = asking_early(batch, context) if engine.is_head else None
        return Drawn(generator.draw(batch, order._replace(on_ended=on_ended)))
    most = sampling.max_new_tokens
    whole = getattr(generator, "draws_turns", False)  # a user's own engine may be older than turns
    together = config.environment.together or not whole
    dialogues = Dialogues(batch, context, config, most, purpose, together) if engine.is_head else None
    turns = Turns(min(config.environment.max_turn_tokens or most, most), dialogues, together)
    drawn = (
        generator.draw(batch, order._replace(turns=turns))
        if whole
        else turn_by_turn(engine, generator.draw, batch, order._replace(turns=turns))
    )
    if drawn is None or dialogues is None:
        return Drawn(None)
    return Drawn(dialogues.completed(drawn), dialogues.figures())


def _seed(seed: int, purpose: str, iteration: int, sample: int) -> int:
    """The seed of a sample's environment."""
    return int(counter_bits(seed, purpose, iteration, np.array([sample]), np.zeros(1, dtype=np.int64))[0])


def response_tokens(mask: Tensor) -> int:
    """Tokens of a response, observations among them, by its `response_mask` with the prompt."""
    return len(mask) - int(mask.int().argmax()) if mask.any() else 0


class _Dialogue:
    """What is known of a sample that an environment answers.

    room       tokens that may still come
    new        tokens of it that are to be read before its next turn
    texts      of its turns
    last       the token that was drawn last
    is_cut     whether its last turn did not end
    think_s    seconds that its environment took to answer each of its turns
    reward     sum of the environment's
    truncated  whether the environment has not ended it
    fault      how the environment has failed; "" where it has not
    calls      of tools, by OUTCOMES
    lengths    tokens of its turns
    said       `Answer.digest` of the answers to them
    is_over    whether nothing follows its last turn
    """

    def __init__(self, prompt_tokens: int, row: Mapping[str, Any], seed: int, most: int) -> None:
        self.row, self.seed, self.room, self.new = row, seed, most, prompt_tokens - 1
        self.texts: list[str] = []
        self.think_s: list[float] = []
        self.asked_s = 0.0  # time.monotonic() when its last turn had ended
        self.observed = 0  # tokens
        self.last, self.is_cut = 0, False
        self.reward, self.truncated, self.fault = 0.0, True, ""
        self.calls = Counter[str]()
        self.lengths: list[int] = []
        self.said: list[int] = []
        self.is_over = False


class Dialogues:
    """The samples of a head, which its environments answer: the partners of generation (turns.py).

    batch       `prompt_ids` and `columns`; where episodes continue (segments.py) also BEGUN, and what `completed`
                has said of them: ENVIRONMENT_REWARDS, ANSWERED, `response_mask`, TOOL_CALLS
    read_again  tokens that were read more than once
    """

    def __init__(
        self,
        batch: SampleBatch,
        context: CallContext,
        config: Scores,
        most: int,
        purpose: str = "rollout",
        together: bool = True,
    ) -> None:
        assert context.environment is not None, "the rank has no environment process"
        assert config.environment is not None, "the run has an environment"
        self.read_again, self._together = 0, together
        self._context, self._config, self._limits = context, config, config.environment
        self._environment = context.environment
        self._continues = ANSWERED in batch.data
        self._observations = Observations(context.tokenizer)
        self._open = 0  # turns whose answers are not taken yet
        self._answered: dict[int, Following] = {}
        begun = batch[BEGUN].values.tolist() if self._continues else [context.iteration] * len(batch)
        prompts, rows = batch["prompt_ids"].lengths, batch["columns"].texts()
        self._dialogues = {
            sample: _Dialogue(
                prompt, json.loads(row), _seed(config.seed, f"environment/{purpose}", iteration, sample), most
            )
            for sample, prompt, row, iteration in zip(batch.ids, prompts, rows, begun, strict=True)
        }
        if self._continues:
            self._continue(batch)
        self._environment.begin([sample for sample, one in self._dialogues.items() if one.texts])

    def _continue(self, batch: SampleBatch) -> None:
        """Take up the episodes where an earlier iteration has left them."""
        parts = {key: packed.to(torch.device("cpu")).split() for key, packed in batch.data.items()}
        for place, dialogue in enumerate(self._dialogues.values()):
            sample = {key: of_key[place] for key, of_key in parts.items()}
            drawn = sample["prompt_ids"][sample["response_mask"]]
            dialogue.lengths, dialogue.said = sample[ANSWERED].view(2, -1).tolist()
            dialogue.texts = [self._said(turn.tolist()) for turn in drawn.split(dialogue.lengths)]
            dialogue.room -= response_tokens(sample["response_mask"])
            dialogue.reward = sample[ENVIRONMENT_REWARDS].item()
            if self._config.tools:
                calls, *others = sample[TOOL_CALLS].tolist()
                dialogue.calls.update(dict(zip(OUTCOMES, (calls - sum(others), *others), strict=True)))

    def begun(self, sample: int, read: int) -> None:
        """Count what is read again."""
        dialogue = self._dialogues[sample]
        self.read_again += max(0, read - dialogue.new)
        dialogue.new = 0

    def ended(self, sample: int, turn: Turn) -> None:
        """Ask the environment."""
        dialogue = self._dialogues[sample]
        dialogue.room -= len(turn.ids)
        dialogue.last, dialogue.is_cut = turn.ids[-1], turn.is_cut
        dialogue.texts.append(self._said(turn.ids))
        dialogue.lengths.append(len(turn.ids))
        dialogue.asked_s = time.monotonic()
        self._open += 1
        try:
            episode = Episode(sample, dialogue.row, dialogue.seed, dialogue.texts, dialogue.said)
            self._environment.submit(episode)
        except RewardError as error:
            raise RewardError(f"{error}{self._about(error.place)}", error.traceback) from None

    def answered(self, samples: Collection[int], wait_s: float) -> list[Following]:
        """What follows from the environments' answers; nothing where all are to be taken together, and some are
        still to come, or some sequences are drawn."""
        waits = self._open > len(self._answered) and (self._together or not self._answered)
        try:
            answers = self._environment.answered(wait_s if waits else 0.0)
        except RewardError as error:
            raise RewardError(f"{error}{self._about(error.place)}", error.traceback) from None
        for sample, answer in answers.items():
            dialogue = self._dialogues[sample]
            dialogue.think_s.append(time.monotonic() - dialogue.asked_s)
            self._answered[sample] = following = self._following(sample, answer)
            dialogue.said.append(answer.digest if isinstance(answer, Answer) else 0)
            dialogue.is_over = not following.most
        if self._together and (not wait_s or self._open > len(self._answered)):
            return []
        taken = [self._answered.pop(each) for each in sorted(samples & self._answered.keys())]
        self._open -= len(taken)
        return taken

    def _said(self, ids: Sequence[int]) -> str:
        """The text of a turn. Where it may call tools, it has its special tokens, but not the one that ends it."""
        tokenizer = self._context.tokenizer
        if not self._config.tools:
            return tokenizer.decode(ids)
        return tokenizer.decode(ids[:-1] if ids[-1] in tokenizer.stop_ids else ids, special_tokens=True)

    def _about(self, sample: int | None) -> str:
        """A sentence about the sample on which the environment failed: its number, its row, its last turn."""
        if sample is None:
            return ""
        texts = self._dialogues[sample].texts
        said = json.dumps(shortened(texts[-1], 100), ensure_ascii=False)
        return (
            f" It was at sample {sample} ({self._context.where(sample)}), whose turn {len(texts)} was {said}."
        )

    def _following(self, sample: int, answer: Answer | FailedAnswer) -> Following:
        """Take an answer. What follows is the observation and a turn, or nothing where the response is over."""
        dialogue, over = self._dialogues[sample], Following(sample)
        if isinstance(answer, FailedAnswer):
            dialogue.fault = answer.reason
            return over
        dialogue.reward += answer.reward
        dialogue.truncated = not answer.done or (bool(self._config.tools) and dialogue.is_cut)
        if answer.done:
            return over
        if not isinstance(answer.observation, str):
            dialogue.calls.update(each["outcome"] for each in answer.observation)
        try:
            prompt = dialogue.row.get("prompt")
            ids = observed(self._observations, self._config, answer.observation, prompt, dialogue.last)
        except RewardError as error:
            if self._config.on_reward_error != "skip":
                raise RewardError(f"{error}{self._about(sample)}") from None
            dialogue.fault = str(error)
            return over
        if len(dialogue.texts) == self._limits.max_turns or len(ids) >= dialogue.room:
            return over
        dialogue.room -= len(ids)
        dialogue.new = len(ids)
        dialogue.observed += len(ids)
        return Following(sample, ids, min(self._limits.max_turn_tokens or dialogue.room, dialogue.room))

    def figures(self) -> list[float]:
        """Sums over the responses, by TURNS."""
        played = self._dialogues.values()
        thought = [each.think_s for each in played]
        if self._together:
            longest_s = sum(max(of_turn) for of_turn in zip_longest(*thought, fillvalue=0.0))
        else:
            longest_s = max(map(sum, thought), default=0.0)
        turns, observed_tokens = sum(map(len, thought)), sum(each.observed for each in played)
        return [self.read_again, turns, observed_tokens, sum(map(sum, thought)), len(thought) * longest_s]

    def completed(self, drawn: SampleBatch) -> SampleBatch:
        """What was drawn, with what the environments have said of it, by the keys of `draw`."""
        device = drawn["input_ids"].values.device
        made, one = [self._dialogues[sample] for sample in drawn.ids], (1,) * len(drawn)
        truncated = torch.tensor([each.truncated for each in made], dtype=torch.bool, device=device)
        rewards = torch.tensor([each.reward for each in made], dtype=torch.float64, device=device)
        data = {**drawn.data, "truncated": Packed(truncated, one), ENVIRONMENT_REWARDS: Packed(rewards, one)}
        if self._config.tools:
            calls = [[each.calls.total(), *map(each.calls.__getitem__, OUTCOMES[1:])] for each in made]
            numbers = torch.tensor(calls, dtype=torch.int64, device=device).view(-1)
            data[TOOL_CALLS] = Packed(numbers, (len(OUTCOMES),) * len(made))
        if self._continues:
            turns = [[*each.lengths, *each.said] for each in made]
            numbers = torch.tensor([n for each in turns for n in each], dtype=torch.int64, device=device)
            data[ANSWERED] = Packed(numbers, tuple(map(len, turns)))
            over = torch.tensor([each.is_over for each in made], dtype=torch.bool, device=device)
            data[ENDED] = Packed(over, one)
        if self._config.on_reward_error == "skip":
            faults = [each.fault.encode(errors="backslashreplace") for each in made]
            text = torch.tensor(list(b"".join(faults)), dtype=torch.uint8, device=device)
            data[ENVIRONMENT_FAULT] = Packed(text, tuple(map(len, faults)))
        return SampleBatch(drawn.ids, data)
