"""The simulated cluster: groups are made when every rank joins, closed links do nothing, slow times overlap."""

import pytest

from prefect_rlhf.rlhf_tasks.protocol.messages import Reset, Restore
from prefect_rlhf.rlhf_tasks.protocol.progress import Pace
from prefect_rlhf.rlhf_tasks.rehearsal.assumptions import HostFault, Machines, Noise, RankFault, SlowFault
from prefect_rlhf.rlhf_tasks.rehearsal.cluster import SimulatedCluster
from prefect_rlhf.rlhf_tasks.rehearsal.story import WaitLog
from prefect_rlhf.rlhf_tasks.rehearsal.time_and_disk import VirtualTime
from tests.rlhf_tasks.plans import generation_spec
from tests.rlhf_tasks.protocol.plans import small_plan
from tests.rlhf_tasks.rehearsal.rehearsals import SECONDS, costs_of

PLAN = small_plan()
MACHINES = Machines(join_s=5.0, reset_s=1.0, disk_bytes_per_s=1e9)


class Clustered:
    """The small plan's three ranks, each of which reads 2 GB when it loads, and a controller's links to them.

    told  (seconds, rank, kind) of what the ranks have told, besides how much they have moved
    hits  kinds of the faults that have hit something
    """

    def __init__(self, loop):
        self.loop, self.told, self.hits = loop, [], []
        self.cluster = SimulatedCluster(
            loop,
            PLAN,
            costs_of(PLAN, SECONDS, read_bytes=2e9),
            MACHINES,
            Noise(0, 0.0),
            WaitLog(),
            Pace(300.0, 1e6),
            lambda idle: None,
            self.hits.append,
        )
        self.links = [
            self.cluster.link(rank, f"rank-{rank}", "c", "", self._hear, self._lost, self._started)
            for rank in range(PLAN.n_devices)
        ]
        for link in self.links:
            self.wait_for(link.open(10.0))

    def _hear(self, news):
        if news.kind != "moved":
            self.told.append((self.loop.time(), news.rank, news.kind))

    def _lost(self, rank, reason):
        self.told.append((self.loop.time(), rank, "lost"))

    def _started(self, rank):
        self.told.append((self.loop.time(), rank, "started"))

    def wait_for(self, work):
        return self.loop.run_until_complete(work)

    def pass_s(self, seconds):
        self.loop.call_later(seconds, self.loop.stop)
        self.loop.run_forever()

    def reset(self, rank):
        self.links[rank].send(Reset(run="r", attempt=1, generation=0, rank=rank))

    def restore(self, rank):
        spec = generation_spec(PLAN, rank, {}, "", 0, "", run="r", attempt=1, restore_step=1, iterations=2)
        self.links[rank].send(Restore(spec=spec))


@pytest.fixture
def ranks():
    loop = VirtualTime()
    yield Clustered(loop)
    loop.close()


def test_ranks_load_when_the_last_of_them_joins_the_groups(ranks):
    for rank in range(3):
        ranks.reset(rank)
    ranks.pass_s(2.0)
    assert sorted(ranks.told) == [(1.0, rank, "reset") for rank in range(3)]
    ranks.restore(0)
    ranks.restore(1)
    ranks.pass_s(100.0)
    assert len(ranks.told) == 3, "nobody has loaded"
    assert ranks.cluster.disks[0].in_progress() == []
    ranks.restore(2)
    ranks.pass_s(100.0)
    # 5 s to make the groups, and 6 GB at 1 GB/s.
    assert sorted(rank for _, rank, kind in ranks.told[3:] if kind == "restored") == [0, 1, 2]
    assert [at_s for at_s, _, _ in ranks.told[3:]] == [pytest.approx(102.0 + 5.0 + 6.0)] * 3


def test_a_closed_link_sends_nothing_and_ends_no_process(ranks):
    link, process = ranks.links[1], ranks.cluster.processes[1]
    ranks.wait_for(link.close())
    ranks.reset(1)
    link.restart(False, 100.0)
    ranks.pass_s(200.0)
    assert ranks.told == []
    assert ranks.cluster.processes[1] is process
    assert process.inbox.lease is None


def test_the_end_of_a_slow_time_of_a_disk_leaves_another_one_as_it_is(ranks):
    for for_s, factor in ((10.0, 4.0), (20.0, 2.0)):
        ranks.cluster.strike(SlowFault(kind="slow_disk", at_s=0, host=0, for_s=for_s, factor=factor))
    rates = []
    for _ in range(3):
        rates.append(ranks.cluster.disks[0].rate)
        ranks.pass_s(10.5)
    assert rates == pytest.approx([1e9 / 8, 1e9 / 2, 1e9])


def test_what_has_no_process_is_not_hit(ranks):
    for kind in ("kill", "hang", "stop", "error"):
        ranks.cluster.strike(RankFault(kind=kind, at_s=0, rank=1))
    for _ in range(2):
        ranks.cluster.strike(HostFault(kind="host", at_s=0, host=0))
    assert ranks.hits == ["kill", "host"]


def test_an_error_does_not_hit_a_rank_that_is_idle(ranks):
    ranks.cluster.strike(RankFault(kind="error", at_s=0, rank=1))
    ranks.pass_s(100.0)
    assert ranks.hits == []
