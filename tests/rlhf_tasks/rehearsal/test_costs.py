"""What nodes take in an iteration of a rehearsal."""

from rlhf_tasks.rehearsal.costs import Costs
from tests.planner.plan.test_leads import TOGETHER, graph_of, plan_of


def seconds(staleness, to_end_s=None):
    """Of generation and of training, in each of six iterations."""
    plan = plan_of(graph_of(staleness), TOGETHER)
    costs = Costs(
        node_s=dict.fromkeys((node.name for node in plan.nodes), 3.0),
        copy_s={},
        saved_bytes={},
        read_bytes={},
        iteration_s=1.0,
        iterations=6,
        to_end_s=to_end_s or {},
    )
    return [
        [costs.seconds(plan.node(name), t) for t in range(6)] for name in ("actor_generate", "actor_train")
    ]


def test_what_runs_ahead_draws_all_that_is_due_at_once_and_nothing_at_the_end():
    assert seconds(0) == [[3] * 6, [3] * 6]
    assert seconds(2) == [[9, 3, 3, 3, 0, 0], [3] * 6]


def test_segments_begin_two_batches_and_draw_the_last_one_to_its_end():
    assert seconds(0, {"actor_generate": 20.0})[0] == [6, 3, 3, 3, 3, 20]
    assert seconds(2, {"actor_generate": 20.0})[0] == [12, 3, 3, 20, 0, 0]
