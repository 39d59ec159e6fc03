"""A person promotes or rejects a better model, by the input form of a paused flow run in Prefect."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple
from uuid import UUID, uuid4

from httpx import HTTPError
from prefect.client.orchestration import get_client
from prefect.exceptions import FlowPauseTimeout, ObjectNotFound, PrefectException
from prefect.flow_runs import apause_flow_run, asuspend_flow_run
from prefect.input import RunInput
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Running
from pydantic import Field, ValidationError

from prefect_rlhf.flows.view.artifacts import markdown_table

LOOK_EVERY_S = 5  # whether somebody has answered
SAMPLES = 10

logger = logging.getLogger(__name__)


class Approval(RunInput):
    """What the form asks."""

    decision: Literal["promote", "reject"] = Field(description="Promote the new model, or keep the champion.")
    comment: str = Field(default="", description="Why; kept with the decision.")


class Answer(NamedTuple):
    """What a person has answered. comment: that of the form, or why there is no answer"""

    promotes: bool
    comment: str


async def ask(what: str, timeout_s: int, name: str) -> Answer:
    """Pause the flow run until a person has answered the form. Without an answer in time the champion is kept.

    A flow run of a deployment is suspended: Prefect gives a paused one's slot of the concurrency limit away, and ends
    its process when the slot's lease cannot be renewed. So the process ends here (`prefect.exceptions.Pause`), and
    the one that Prefect starts after the answer gets it by asking again.

    what  markdown above the form
    name  of what is asked, in this flow run
    """
    form = Approval.with_initial_data(description=what)
    try:
        if deployment.id is not None:
            answer = await asuspend_flow_run(form, timeout=timeout_s, key=name)
        else:  # a key of its own for each process: Prefect takes one that it has seen for a pause that is over
            answer = await apause_flow_run(
                form, timeout=timeout_s, poll_interval=LOOK_EVERY_S, key=uuid4().hex
            )
    except FlowPauseTimeout:
        async with get_client() as client:  # Prefect calls a pause that is over a failure
            await client.set_flow_run_state(UUID(flow_run.id), Running(), force=True)
        return Answer(False, unanswered(timeout_s))
    except ValidationError:  # resumed without the form
        return Answer(False, "the flow run was resumed without an answer")
    chosen = f"{answer.decision}: {answer.comment}" if answer.comment else answer.decision
    return Answer(answer.decision == "promote", chosen)


def unanswered(timeout_s: int) -> str:
    """Why there is no answer."""
    return f"nobody has answered within {timeout_s} s"


def is_resumed(flow_run_id: str) -> bool:
    """Whether a flow run that was suspended for an answer has been resumed and not ended; True where its server does
    not tell. The answer is in Prefect then, whether or not a worker has started the process that takes it.
    """
    if not PREFECT_API_URL.value():
        return True
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run_id)).state
    except ObjectNotFound:
        return False
    except (HTTPError, PrefectException, OSError):
        return True
    return state is None or not (state.is_paused() or state.is_final())


def question(
    heading: str,
    facts: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
) -> str:
    """The markdown above the form: what has changed, the metrics of both models, samples side by side."""
    changed = [{"what": name, "value": str(value)} for name, value in facts.items()]
    parts = [f"# {heading}", markdown_table(changed), markdown_table(metrics)]
    if samples:
        parts += ["Samples, those first where the scores differ most:", markdown_table(samples)]
    return "\n\n".join(parts)


def side_by_side(
    candidate: Sequence[Mapping[str, Any]], champion: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """At most SAMPLES prompts with the answers of both models and their scores, by the size of the difference."""
    before = {sample["id"]: sample for sample in champion}
    pairs = [(new, before.get(new["id"])) for new in candidate]
    pairs.sort(key=lambda pair: -abs(pair[0]["score"] - (pair[1]["score"] if pair[1] else 0.0)))
    return [
        {
            "prompt": _text(new["prompt"]),
            "candidate": _text(new["completion"]),
            "score": new["score"],
            **({"champion": _text(old["completion"]), "its score": old["score"]} if old else {}),
        }
        for new, old in pairs[:SAMPLES]
    ]


MOST_CHARACTERS = 200


def _text(value: Any) -> str:
    if not isinstance(value, str):
        value = "\n".join(f"{message['role']}: {message['content']}" for message in value)
    return value if len(value) <= MOST_CHARACTERS else f"{value[: MOST_CHARACTERS - 1]}…"
