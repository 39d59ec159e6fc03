"""Engine hosts on a real cluster, with the test as their controller: requests in portions, out of turn, refused."""

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import uuid4

import pytest
from distributed.core import connect, rpc

from prefect_rlhf.rlhf_tasks.controller.controller import Rendezvous
from prefect_rlhf.rlhf_tasks.protocol.messages import (
    NEWS,
    Deliver,
    Done,
    Failed,
    Moved,
    Reset,
    Restore,
    Told,
)
from prefect_rlhf.rlhf_tasks.protocol.sequencer import Sequencer
from tests.rlhf_tasks.plans import call, generation_spec, on, plan_of
from tests.rlhf_tasks.settings import DEADLINES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
N_RANKS = 3
EXECUTOR = "tests.rlhf_tasks.fake_rank:make_executor"


def random_plan(seed, n_nodes=60):
    """Calls on random overlapping meshes, without any edge: nothing but the total order keeps them apart."""
    rng = random.Random(seed)
    meshes = [rng.sample(range(N_RANKS), rng.randint(1, N_RANKS)) for _ in range(n_nodes)]
    nodes = tuple(call(f"call{i}", "frozen", "inference", on(*sorted(mesh))) for i, mesh in enumerate(meshes))
    return plan_of(nodes, {}, N_RANKS)


@asynccontextmanager
async def links(cluster):
    """A link to each rank."""
    client = uuid4().hex
    comms = []
    try:
        for member in cluster.ranks[:N_RANKS]:
            comm = await connect(member.address, **cluster.connection_args)
            comms.append(comm)
            await comm.write({"op": "rlhf_link", "client": client, "executor": EXECUTOR})
            assert "boot" in await comm.read()
        yield comms
    finally:
        for comm in comms:
            comm.abort()


async def send(comm, message):
    await comm.write(message.model_dump_json().encode())


async def read(comm):
    """The next news that is not of bytes moved."""
    while True:
        news = NEWS.validate_json(await asyncio.wait_for(comm.read(), 300))
        if not isinstance(news, Moved):
            return news


async def load(comms, plan, folder, store, config, generation=0):
    """Bring every rank to a generation."""
    prefix = uuid4().hex
    for rank, comm in enumerate(comms):
        await send(comm, Reset(run="fake", attempt=1, generation=generation, rank=rank))
    for rank, comm in enumerate(comms):
        news = await read(comm)
        assert (news.kind, news.rank) == ("reset", rank)
    for rank, comm in enumerate(comms):
        spec = generation_spec(
            plan,
            rank,
            config,
            folder,
            store.port,
            prefix,
            run="fake",
            attempt=1,
            generation=generation,
            iterations=1,
        )
        await send(comm, Restore(spec=spec))
    for comm in comms:
        assert (await read(comm)).kind == "restored"


@pytest.mark.parametrize("seed", range(3))
def test_calls_on_overlapping_meshes_run_in_order_whenever_their_requests_come(cluster, tmp_path, seed):
    plan = random_plan(seed)
    requests = Sequencer(plan, "fake", 1, DEADLINES).requests(0)

    async def drive(comm, mine, rng):
        """Send a rank its requests one by one, and the last once more; its results, and how that was refused."""

        async def deliver():
            for request in (*mine, mine[-1]):
                await send(comm, Deliver(requests=(request,)))
                await asyncio.sleep(rng.random() * 0.003)

        delivering = asyncio.create_task(deliver())
        results, refused = [], []
        while len(results) < len(mine) or not refused:
            news = await read(comm)
            assert not isinstance(news, Failed), news
            if isinstance(news, Done):
                results.append(news.result)
            elif news.kind == "refused":
                refused.append(news.reason)
        await delivering
        return results, refused

    async def run():
        store = Rendezvous("127.0.0.1")
        async with links(cluster) as comms:
            await load(comms, plan, tmp_path, store, {"sleep_s": 0.002})
            work = [
                drive(comm, requests[rank], random.Random(f"{seed} {rank}"))
                for rank, comm in enumerate(comms)
            ]
            return await asyncio.gather(*work)

    results = asyncio.run(run())
    for rank, mine in requests.items():
        ran, refused = results[rank]
        assert [result.key for result in ran] == [request.key for request in mine]
        assert refused == [f"request {len(mine) - 1} came in the place of request {len(mine)}."]
    assert sum(len(ran) for ran, _ in results) == sum(len(node.devices) for node in plan.nodes)


def test_a_busy_rank_answers_at_once_and_refuses_others(cluster, tmp_path):
    plan = random_plan(0, n_nodes=1)
    requests = Sequencer(plan, "fake", 1, DEADLINES).requests(0)
    busy = min(requests)
    answered = tmp_path / "answered"

    async def run():
        store = Rendezvous("127.0.0.1")
        async with links(cluster) as comms, links(cluster) as others:
            await load(comms, plan, tmp_path, store, {"held": str(answered)})
            for rank, mine in requests.items():
                await send(comms[rank], Deliver(requests=mine))
            entered = await read(comms[busy])
            async with rpc(cluster.ranks[busy].address, connection_args=cluster.connection_args) as rank:
                status = await rank.rlhf_status()
            await send(others[busy], Reset(run="other", attempt=1, generation=0, rank=busy))
            refused = await read(others[busy])
            old = replace(requests[busy][0], key=requests[busy][0].key._replace(generation=7))
            await send(comms[busy], Deliver(requests=(old,)))
            stale = await read(comms[busy])
            answered.touch()
            return entered, status, refused, stale, await read(comms[busy])

    entered, status, refused, stale, done = asyncio.run(run())
    assert isinstance(entered, Told)
    assert entered.kind == "entered"
    assert status["job"] == "call0-it0"
    assert refused.kind == "refused"
    assert "held by run 'fake', attempt 1" in refused.reason
    assert stale.kind == "refused"
    assert "generation 0" in stale.reason
    assert isinstance(done, Done)


async def lease_of(cluster, member):
    async with rpc(member.address, connection_args=cluster.connection_args) as rank:
        return (await rank.rlhf_status())["lease"]


def test_a_rank_taken_over_before_its_last_job_has_ended_goes_by_its_new_number(cluster, tmp_path):
    """Its controller has left in the middle of a node, and the next one counts the ranks from the other end."""
    plan = random_plan(0, n_nodes=1)
    requests = Sequencer(plan, "fake", 1, DEADLINES).requests(0)
    busy = min(requests)
    member = cluster.ranks[busy]
    answered = tmp_path / "answered"

    async def run():
        store = Rendezvous("127.0.0.1")
        async with links(cluster) as comms:
            await load(comms, plan, tmp_path, store, {"held": str(answered)})
            await send(comms[busy], Deliver(requests=requests[busy]))
            await read(comms[busy])
        while await lease_of(cluster, member):
            await asyncio.sleep(0.01)
        async with links(cluster) as comms:
            loading = asyncio.create_task(load(comms[::-1], plan, tmp_path, store, {}))
            while not await lease_of(cluster, member):
                await asyncio.sleep(0.01)
            answered.touch()
            await loading
            results = []
            for rank, mine in requests.items():
                await send(comms[N_RANKS - 1 - rank], Deliver(requests=mine))
            for rank in requests:
                news = await read(comms[N_RANKS - 1 - rank])
                results.append(await read(comms[N_RANKS - 1 - rank]) if isinstance(news, Told) else news)
            return results

    for rank, done in zip(requests, asyncio.run(run()), strict=True):
        assert isinstance(done, Done), done
        assert done.result.rank == rank
