"""The process beside a head that runs a user's agents, as the head sees it (server.py)."""

import json
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prefect_rlhf.rlhf_tasks.config.functions import is_pickled
from prefect_rlhf.rlhf_tasks.config.responses import AgentConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.data.tokenizer import template_of
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import own_or_base
from prefect_rlhf.rlhf_tasks.user_code.agents.chat_api import BEAT_S, Asked, Drawing, Limits
from prefect_rlhf.rlhf_tasks.user_code.agents.streams import Piece
from prefect_rlhf.rlhf_tasks.user_code.process import ENDING_S, Terms, UserProcess
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import format_of

STARTING_S = 120.0
"""In which the process must start, and without a word of it at most: it says one every BEAT_S."""
OWN_BYTES = 1 << 30  # of the process itself, besides what agents may take
assert STARTING_S > BEAT_S


class Ended(NamedTuple):
    """An episode that is over.

    reward    as its agent has said; None where it has not
    fault     why it has failed, as the rest of a sentence about the agent; "" where it has not
    requests  answers that it has asked for
    refused   requests that were refused
    columns   of its row for rewards, besides those that it has: a JSON object
    """

    sample: int
    reward: float | None
    fault: str
    requests: int
    refused: int
    columns: str = "{}"


def longest_agents_s(config: Scores) -> float:
    """Seconds that the agents of a rank's batch may take, whatever they do; 0 without agents."""
    agent = config.agent
    if agent is None:
        return 0.0
    return -(-config.batch_size // agent.at_once) * (agent.timeout_s + ENDING_S) + STARTING_S


def _rollout(
    config: Scores, place: str, drawing: Drawing, folder: Path, step: int, longest: int | None
) -> str:
    """The settings of `rollouts.play`."""
    sampling = config.sampling.model_dump(include={"max_completion_length", "top_k"})
    settings = {
        "function": str(folder / place) if is_pickled(place) else place,
        "tokenizer": str(own_or_base(config.models.tokenizer, "tokenizer.json").parent),
        "sampling": sampling
        | drawing._asdict()
        | ({} if longest is None else {"max_completion_length": longest}),
        "step": step,
        "is_scored": bool(config.scoring_rewards),
    }
    return json.dumps(settings)


class AgentProcess:
    """The agents of one generate call on a head, and their server, which is open from the first message on."""

    def __init__(
        self,
        config: Scores,
        agent: AgentConfig,
        drawing: Drawing,
        folder: Path = Path(),
        step: int = 0,
        longest: int | None = None,
    ) -> None:
        """folder: the run's. step: iterations that are finished. longest: tokens of a response"""
        most_bytes = config.reward_memory_bytes
        limits = Limits(agent.at_once, agent.timeout_s, agent.max_requests, most_bytes)
        tool_format = config.tool_format or format_of(template_of(config.models.tokenizer))
        self._process = UserProcess(
            Terms(
                kind="prefect_rlhf.rlhf_tasks.user_code.agents.server:Agents",
                what="agents",
                who=lambda called: called,
                begin={
                    "command": agent.words,
                    "rollout": agent.rollout
                    and _rollout(config, agent.rollout, drawing, folder, step, longest),
                    "limits": limits,
                    "drawing": drawing,
                    "tool_format": tool_format,
                    "blocks": {},
                },
                timeout_s=STARTING_S,
                timeout_key="agent.timeout_s",
                most_bytes=agent.at_once * most_bytes + OWN_BYTES,
            )
        )
        self._heard_s = time.monotonic()

    def tell(
        self,
        episodes: Sequence[tuple[int, str, int]] = (),
        answers: Sequence[tuple[int, dict[str, Any]]] = (),
        pieces: Sequence[tuple[int, Piece]] = (),
    ) -> None:
        """Say what is to be done, and wait for nothing but the start of the process.

        episodes  sample, row as JSON and seed of those to be played, in this order
        answers   number of a request -> its answer: `choices` and `prompt_tokens`, or `refused` and `code`
        pieces    number of a request that is streamed, and what was drawn of its answer
        Raises RewardError where no process starts.
        """
        listed = [(number, *piece) for number, piece in pieces]
        self._process.submit({"episodes": episodes, "answers": answers, "pieces": listed})

    def heard(self, wait_s: float) -> tuple[list[Asked], list[Ended]]:
        """(requests that have come, episodes that have ended) since the last call. Waits for the first of them, so
        many seconds at most. Raises RewardError where the process is lost."""
        until_s = time.monotonic() + wait_s
        while True:
            replies, now_s = self._process.replies(), time.monotonic()
            requests = [Asked(*each) for reply in replies for each in reply["asked"]]
            ended = [Ended(**each) for reply in replies for each in reply["ended"]]
            if replies:
                self._heard_s = now_s
            elif now_s - self._heard_s > STARTING_S:
                raise self._process.late(self._heard_s)
            if requests or ended or now_s >= until_s:
                return requests, ended
            waiting = select.poll()
            self._process.watch(waiting)
            waiting.poll(min(until_s - now_s, BEAT_S) * 1000)

    def close(self) -> None:
        """Close the endpoint, and end all that agents have started."""
        self._process.close()
        self._process.end()
