"""Inbox: stimulus in, instructions out."""

import random

import pytest

from prefect_rlhf.rlhf_tasks.protocol.inbox import TRANSITIONS, Inbox, InboxPhase, Lease, refusal
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    RESET,
    RESTORE,
    SETUP,
    Clear,
    Done,
    Failed,
    Interrupt,
    Load,
    Run,
    Told,
)
from prefect_rlhf.rlhf_tasks.spec import NodeFailure, NodeKey, NodeRequest, NodeResult


def key(number: int, generation: int = 0, run: str = "run", attempt: int = 0) -> NodeKey:
    """Two nodes an iteration: numbers 0, 1 are iteration 0; 2, 3 iteration 1; ..."""
    return NodeKey(run, attempt, generation, number // 2, f"node{number % 2}")


def setup(node: str, generation: int = 0, run: str = "run", attempt: int = 0) -> NodeKey:
    return NodeKey(run, attempt, generation, SETUP, node)


def request(number: int, **names) -> NodeRequest:
    return NodeRequest(key=key(number, **names), number=number, first_sample=0, versions={}, deadline_s=9)


def result(number: int, **names) -> NodeResult:
    return NodeResult(key=key(number, **names), rank=0, started_s=0, ended_s=1)


def failure(of: NodeKey) -> NodeFailure:
    return NodeFailure(key=of, rank=0, error="broke")


def told(kind: str, of: NodeKey, reason: str = "") -> Told:
    return Told(kind=kind, rank=0, key=of, reason=reason)


def running(number: int, **names) -> list:
    return [told("entered", key(number, **names)), Run(request(number, **names))]


def ready(generation: int = 0, inbox: Inbox | None = None) -> Inbox:
    """An inbox that waits for requests."""
    inbox = inbox or Inbox(0)
    inbox.reset("run", 0, generation, "client")
    inbox.cleared(setup(RESET, generation))
    inbox.restore("run", 0, generation, 3)
    inbox.loaded(setup(RESTORE, generation))
    assert inbox.phase is InboxPhase.READY
    return inbox


def test_from_free_to_ready():
    inbox = Inbox(0)
    assert inbox.reset("run", 0, 0, "client") == [Clear(setup(RESET))]
    assert inbox.cleared(setup(RESET)) == [told("reset", setup(RESET))]
    assert inbox.cleared(setup(RESET)) == [], "no job, no news"
    assert inbox.restore("run", 0, 0, 3) == [Load(setup(RESTORE), 3)]
    assert inbox.loaded(setup(RESTORE)) == [told("restored", setup(RESTORE))]
    assert inbox.loaded(setup(RESTORE)) == [], "a job ends once"


def test_a_restore_of_a_rank_that_is_not_clean_is_refused():
    inbox = Inbox(0)
    inbox.reset("run", 0, 0, "client")
    for _ in range(2):
        (refused,) = inbox.restore("run", 0, 0, 3)
        assert (refused.kind, refused.key) == ("refused", setup(RESTORE))
        inbox = ready()


def test_runs_one_after_the_other():
    inbox = ready()
    assert inbox.deliver([request(0), request(1)]) == running(0)
    assert inbox.deliver([request(2), request(3)]) == []
    assert inbox.finished(result(0)) == [Done(result=result(0)), *running(1)]
    assert inbox.finished(result(1)) == [Done(result=result(1)), *running(2)]
    assert inbox.finished(result(2)) == [Done(result=result(2)), *running(3)]
    assert inbox.finished(result(3)) == [Done(result=result(3))]


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_request_out_of_turn_is_refused(number):
    """A connection brings requests in order, or breaks. So whatever else comes is a fault."""
    inbox = ready()
    inbox.deliver([request(0), request(1)])
    assert inbox.deliver([request(number)]) == [
        told("refused", key(number), f"request {number} came in the place of request 2.")
    ]
    assert inbox.finished(result(0)) == [Done(result=result(0)), *running(1)]


def test_nothing_runs_after_a_failure_until_a_reset():
    inbox = ready()
    inbox.deliver([request(0), request(1)])
    assert inbox.failed(failure(key(0))) == [Failed(failure=failure(key(0)))]
    assert inbox.deliver([request(2), request(3)]) == []
    assert inbox.reset("run", 0, 1, "client") == [Clear(setup(RESET, 1))]


@pytest.mark.parametrize("job", [RESET, RESTORE])
def test_a_reset_or_restore_that_fails_is_told(job):
    inbox = Inbox(0)
    inbox.reset("run", 0, 0, "client")
    if job == RESTORE:
        inbox.cleared(setup(RESET))
        inbox.restore("run", 0, 0, None)
    assert inbox.failed(failure(setup(job))) == [Failed(failure=failure(setup(job)))]
    assert inbox.reset("run", 0, 1, "client") == [Clear(setup(RESET, 1))]


def test_a_reset_waits_for_the_running_job_and_drops_its_result():
    inbox = ready()
    inbox.deliver([request(0), request(1)])
    assert inbox.reset("run", 0, 1, "client") == [Interrupt(key(0))]
    (refused,) = inbox.deliver([request(0, generation=1)])
    assert refused.kind == "refused"
    assert inbox.finished(result(0)) == [Clear(setup(RESET, 1))]
    assert inbox.cleared(setup(RESET, 1)) == [told("reset", setup(RESET, 1))]


def test_a_newer_reset_overtakes_one_that_still_clears_or_loads():
    inbox = Inbox(0)
    inbox.reset("run", 0, 0, "client")
    assert inbox.reset("run", 0, 1, "client") == [Interrupt(setup(RESET, 0))]
    assert inbox.cleared(setup(RESET, 0)) == [Clear(setup(RESET, 1))]
    assert inbox.cleared(setup(RESET, 1)) == [told("reset", setup(RESET, 1))]
    inbox.restore("run", 0, 1, 3)
    assert inbox.reset("run", 0, 2, "client") == [Interrupt(setup(RESTORE, 1))]
    assert inbox.failed(failure(setup(RESTORE, 1))) == [Clear(setup(RESET, 2))]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"run": "other"}, "held by run 'run', attempt 0 (client client)"),
        ({"attempt": 1}, "held by run 'run', attempt 0 (client client)"),
        ({"generation": 4}, "at generation 5"),
        ({"generation": 6}, "at generation 5"),
    ],
)
def test_another_run_attempt_or_generation_is_refused(names, reason):
    inbox = ready(generation=5)
    names = {"generation": 5, **names}
    (refused,) = inbox.deliver([request(0, **names)])
    assert refused.kind == "refused"
    assert refused.key == key(0, **names)
    assert reason in refused.reason
    where = {"run": "run", "attempt": 0, **names}
    (refused,) = inbox.restore(where["run"], where["attempt"], where["generation"], 3)
    assert refused.kind == "refused"
    assert inbox.phase is InboxPhase.READY


def test_a_process_without_a_lease_refuses_requests():
    (refused,) = Inbox(0).deliver([request(0)])
    assert refused.kind == "refused"
    assert "nobody holds this rank" in refused.reason


def test_a_second_run_is_refused_with_the_holders_name_until_the_client_is_gone():
    inbox = ready()
    (refused,) = inbox.reset("other", 0, 0, "other-client")
    assert refused.kind == "refused"
    assert "run 'run', attempt 0 (client client)" in refused.reason
    assert inbox.client_lost("other-client") == [], "not the holder"
    assert inbox.client_lost("client") == [Clear(setup(RESET, run=""))]
    assert inbox.cleared(setup(RESET, run="")) == []
    assert inbox.phase is InboxPhase.FREE
    assert inbox.reset("other", 0, 0, "other-client") == [Clear(setup(RESET, run="other"))]


def test_the_next_attempt_takes_over_and_the_earlier_one_is_refused():
    inbox = ready(generation=7)
    inbox.deliver([request(0, generation=7)])
    assert inbox.reset("run", 1, 0, "next") == [Interrupt(key(0, generation=7))]
    (refused,) = inbox.reset("run", 0, 8, "client")
    assert refused.kind == "refused"
    assert inbox.client_lost("client") == [], "its lease is gone already"
    assert inbox.failed(failure(key(0, generation=7))) == [Clear(setup(RESET, attempt=1))]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_reset_to_no_later_generation_is_refused(generation):
    (refused,) = ready(generation=2).reset("run", 0, generation, "client")
    assert refused == told("refused", setup(RESET, generation), "this rank is at generation 2 already.")


def test_a_client_lost_while_a_node_runs_frees_the_rank_when_the_node_has_ended():
    inbox = ready()
    inbox.deliver([request(0)])
    assert inbox.client_lost("client") == [Interrupt(key(0))]
    (clear,) = inbox.failed(failure(key(0)))
    assert isinstance(clear, Clear)
    assert inbox.cleared(clear.key) == []
    assert inbox.phase is InboxPhase.FREE


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_any_stimuli_runs_the_numbers_in_order_and_one_at_a_time(seed):
    """Random requests, resets, losses of the client and job ends: never two jobs, never a number twice."""
    rng = random.Random(seed)
    inbox, job, ran, generation = Inbox(0), None, [], 0
    for _ in range(400):
        generation += rng.random() < 0.05
        if job is not None and rng.random() < 0.5:
            ended, job = job, None
            out = _end(inbox, ended, well=rng.random() < 0.95)
        else:
            out = _message(inbox, rng, generation)
        for instruction in out:
            if isinstance(instruction, Clear | Load | Run):
                assert job is None, "two jobs at once"
                job = instruction
            if isinstance(instruction, Clear):
                ran = []
            if isinstance(instruction, Run):
                assert instruction.request.number == len(ran)
                assert instruction.request.key.generation == inbox.generation
                ran.append(instruction.request.number)
    assert generation > 5


def test_every_phase_has_a_row_in_the_table():
    assert set(TRANSITIONS) == set(InboxPhase)


def _message(inbox: Inbox, rng: random.Random, generation: int) -> list:
    """Anything that a controller, or its end, can bring."""
    if rng.random() < 0.02:
        return inbox.client_lost("client")
    number = 2 * rng.randrange(6)
    pair = [request(number, generation=generation), request(number + 1, generation=generation)]
    match rng.randrange(3):
        case 0:
            return inbox.reset("run", 0, generation, "client")
        case 1:
            return inbox.restore("run", 0, generation, 0)
        case _:
            return inbox.deliver(pair)


def _end(inbox: Inbox, job: Clear | Load | Run, well: bool) -> list:
    of = job.request.key if isinstance(job, Run) else job.key
    if not well:
        return inbox.failed(failure(of))
    if isinstance(job, Clear):
        return inbox.cleared(of)
    if isinstance(job, Load):
        return inbox.loaded(of)
    return inbox.finished(NodeResult(key=of, rank=0, started_s=0, ended_s=1))


@pytest.mark.parametrize(
    ("holder", "wanted", "granted"),
    [
        (None, Lease("a", 0, "x"), True),
        (Lease("a", 0, "x"), Lease("a", 0, "x"), True),  # a repeat
        (Lease("a", 0, "x"), Lease("a", 1, "y"), True),  # the next attempt takes over
        (Lease("a", 1, "y"), Lease("a", 0, "x"), False),  # an earlier attempt is over
        (Lease("a", 0, "x"), Lease("a", 0, "y"), False),  # the same attempt twice
        (Lease("a", 0, "x"), Lease("b", 9, "z"), False),  # another run
    ],
)
def test_who_may_take_a_rank_from_whom(holder, wanted, granted):
    assert (refusal(holder, wanted) is None) == granted


def test_a_refusal_names_the_holder():
    assert "run 'a', attempt 0 (client x)" in refusal(Lease("a", 0, "x"), Lease("b", 0, "y"))
