"""Ledgers of two ranks in a known state, and what their ranks tell them."""

from prefect_rlhf.rlhf_tasks.protocol.ledger import Ledger, Phase
from prefect_rlhf.rlhf_tasks.protocol.messages import Committed
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan, NodeFailure, NodeKey, NodeResult, SaveNode
from tests.rlhf_tasks.protocol.plans import call, on, plan_of
from tests.rlhf_tasks.settings import with_limits


def pair_plan() -> ExecutionPlan:
    """Two ranks train together, then save."""
    both = on([0, 1])
    train = call("train", "actor", "train_step", both)
    return plan_of(2, {"actor": both}, [train, SaveNode(name="save", role="actor", placement=both)])


def ledger(plan: ExecutionPlan | None = None, **changes) -> Ledger:
    settings = {"run": "run", "attempt": 0, "n_ranks": 2, "total_iterations": 9, "committed_step": 0}
    bounds = {"snapshot_max_s": 1e9, "max_restarts": 3, "io_floor_s": 300, "io_least_bytes_per_s": 10}
    bounds |= {"deadline_factor": 10, "deadline_floor_s": 10}
    return Ledger(plan or pair_plan(), **with_limits(bounds | settings | changes))


def key(node: str, iteration: int = 0, generation: int = 0) -> NodeKey:
    return NodeKey("run", 0, generation, iteration, node)


def result(rank: int, node: str, iteration: int = 0, generation: int = 0) -> NodeResult:
    return NodeResult(key=key(node, iteration, generation), rank=rank, started_s=0, ended_s=1)


def committed(iteration: int, generation: int = 0) -> Committed:
    """What is told of an iteration that both ranks have answered for."""
    results = {
        node: tuple(result(rank, node, iteration, generation) for rank in (0, 1))
        for node in ("train", "save")
    }
    return Committed(iteration=iteration, results=results)


def failure(rank: int, node: str, iteration: int = 0, generation: int = 0) -> NodeFailure:
    of = key(node, iteration, generation)
    return NodeFailure(key=of, rank=rank, error="broke", traceback="where")


def running(now: float = 0, **changes) -> Ledger:
    """A ledger whose two ranks hold the commit."""
    books = ledger(**changes)
    books.start(now)
    return rebuilt(books, now)


def rebuilt(books: Ledger, now: float = 0) -> Ledger:
    """Both ranks reset and restore."""
    for stimulus in (books.rank_reset, books.rank_restored):
        for rank in (0, 1):
            stimulus(rank, books.generation, now)
    assert books.phase is Phase.RUNNING
    return books


def do_nodes(books: Ledger, iteration: int, now: float = 0) -> None:
    """Both ranks answer for both nodes."""
    for node in ("train", "save"):
        for rank in (0, 1):
            books.rank_done(result(rank, node, iteration, books.generation), now)


def do_parts(books: Ledger, iteration: int, now: float = 0) -> list:
    """Both parts become durable; what the last one brings."""
    books.part_durable(0, key("save", iteration, books.generation), "a", now)
    return books.part_durable(1, key("save", iteration, books.generation), "b", now)


def kinds(instructions: list) -> list[type]:
    return [type(instruction) for instruction in instructions]
