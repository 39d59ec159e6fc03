"""What nodes take in an iteration of a rehearsal; fault files: what is read, what is refused, what is drawn."""

import pytest

from prefect_rlhf.rlhf_tasks.rehearsal.assumptions import (
    ControllerFault,
    Costs,
    FaultFile,
    FaultRate,
    HostFault,
    RankFault,
    SlowFault,
    read_faults,
    scheduled,
)
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
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


def written(tmp_path, text):
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    return path


def test_every_kind_is_read(tmp_path):
    path = written(
        tmp_path,
        """
        faults:
          - {kind: stop, at_s: 5, rank: 1}
          - {kind: host, at_s: 6, host: 0, for_s: 60}
          - {kind: controller, at_s: 7}
          - {kind: slow_disk, at_s: 8, host: 1, for_s: 60, factor: 3}
        rate: {per_device_day: 0.5, kinds: {kill: 1}}
        """,
    )
    assert read_faults(path) == FaultFile(
        faults=(
            RankFault(kind="stop", at_s=5, rank=1),
            HostFault(kind="host", at_s=6, host=0, for_s=60),
            ControllerFault(kind="controller", at_s=7),
            SlowFault(kind="slow_disk", at_s=8, host=1, for_s=60, factor=3),
        ),
        rate=FaultRate(per_device_day=0.5, kinds={"kill": 1.0}),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("faults: [{kind: burn, at_s: 1, rank: 0}]", "faults.0.kind"),
        ("faults: [{kind: kill, at_s: -1, rank: 0}]", "faults.0.at_s"),
        ("faults: [{kind: kill, at_s: 1}]", "faults.0.rank"),
        ("faults: [{kind: slow, at_s: 1, host: 0, for_s: 5, factor: 1}]", "faults.0.factor"),
        ("faults: [{kind: kill, at_s: 1, rank: 0, host: 3}]", "faults.0.host"),
        ("faults: [3]", "faults.0"),
        ("rate: {per_device_day: .nan}", "rate.per_device_day"),
        ("rate: {per_device_day: 1, kinds: {burn: 1}}", "rate.kinds"),
        ("{}", "there are neither faults nor a rate"),
        ("- 1", "faults.yaml"),
    ],
)
def test_a_mistake_gets_one_sentence_with_its_place(tmp_path, text, words):
    with pytest.raises(ConfigError) as refused:
        read_faults(written(tmp_path, text))
    assert words in str(refused.value)
    assert "faults.yaml" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (RankFault(kind="kill", at_s=1, rank=16), "rank 16: the plan has the ranks 0 to 15"),
        (HostFault(kind="host", at_s=1, host=2), "host 2: the cluster has the hosts 0 to 1"),
    ],
)
def test_a_fault_of_what_the_cluster_has_not_is_refused(fault, words):
    with pytest.raises(ConfigError, match=words):
        scheduled(FaultFile(faults=(fault,)), 16, 8, 24, 0, "f.yaml")


def test_drawn_faults_are_as_many_as_their_rate_says_and_the_same_for_the_same_seed():
    given = FaultFile(faults=(RankFault(kind="stop", at_s=90_000, rank=0),), rate=FaultRate(per_device_day=1))
    drawn = scheduled(given, 512, 8, 24, 0, "f")
    assert 512 - 4 * 512**0.5 < len(drawn) < 512 + 4 * 512**0.5
    assert [f.at_s for f in drawn] == sorted(f.at_s for f in drawn)
    assert all(f.at_s < 86_400 for f in drawn), "the one in the list strikes after the end"
    assert drawn == scheduled(given, 512, 8, 24, 0, "f") != scheduled(given, 512, 8, 24, 1, "f")
    with pytest.raises(ConfigError, match="gives about"):
        scheduled(FaultFile(rate=FaultRate(per_device_day=1000)), 1024, 8, 24, 0, "f")
