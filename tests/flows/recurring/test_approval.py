"""A person's word about a better model: answered in a browser, too late, or not at all."""

import asyncio
import threading
from contextvars import copy_context

import pytest
from prefect import flow
from prefect.client.orchestration import get_client

from prefect_rlhf.flows.recurring import approval
from tests.flows.recurring.form import answered, flow_run_page

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning"),
]

SAMPLES = [
    {"id": i, "prompt": f"question {i}", "completion": "new *words*", "score": float(i)} for i in range(12)
]
BEFORE = [{**sample, "completion": "old words", "score": 3.0} for sample in SAMPLES]


@flow(name="asks", persist_result=False)
async def asks(timeout_s: int) -> dict:
    pairs = approval.side_by_side(SAMPLES, BEFORE)
    what = approval.question(
        "Promote run 0002?", {"rows learned": 32}, [{"figure": "low", "value": 0.5}], pairs
    )
    return (await approval.ask(what, timeout_s, "0002"))._asdict()


def test_the_samples_are_those_where_the_scores_differ_most():
    pairs = approval.side_by_side(SAMPLES, BEFORE)
    assert len(pairs) == 10
    assert [pair["score"] - pair["its score"] for pair in pairs[:3]] == [8.0, 7.0, 6.0]
    assert (pairs[0]["candidate"], pairs[0]["champion"]) == ("new *words*", "old words")


@pytest.mark.usefixtures("prefect")
def test_without_an_answer_in_time_the_champion_is_kept_and_the_flow_ends_well():
    state = asyncio.run(asks(2, return_state=True))
    assert state.is_completed()
    assert asyncio.run(state.aresult()) == {"promotes": False, "comment": "nobody has answered within 2 s"}


async def paused() -> str:
    """The id of the flow run that waits."""
    async with get_client() as client:
        while True:
            runs = await client.read_flow_runs()
            waiting = [
                run for run in runs if run.state.is_paused() and run.state.state_details.run_input_keyset
            ]
            if waiting:
                return str(waiting[0].id)
            await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("decision", ["promote", "reject"])
def test_the_form_is_answered_in_a_browser(prefect, decision):
    answers, found, context = [], [], copy_context()
    flow_thread = threading.Thread(
        target=lambda: context.run(lambda: answers.append(asyncio.run(asks(200)))), daemon=True
    )
    flow_thread.start()
    in_context = copy_context()
    look = threading.Thread(
        target=lambda: in_context.run(lambda: found.append(asyncio.run(paused()))), daemon=True
    )
    look.start()
    look.join(100)
    with flow_run_page(prefect, found[0]) as page:
        text = answered(page, "Promote run 0002?", decision)
        assert text.count("new *words*") == 10, "samples stand side by side, their text as it is"
        flow_thread.join(60)
    assert answers == [{"promotes": decision == "promote", "comment": f"{decision}: looks right"}]
