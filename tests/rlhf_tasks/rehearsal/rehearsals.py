"""Rehearsals of small plans, for tests."""

from prefect_rlhf.rlhf_tasks.protocol.messages import RunSpec
from prefect_rlhf.rlhf_tasks.rehearsal.assumptions import Costs, Machines, Noise
from prefect_rlhf.rlhf_tasks.rehearsal.rehearsal import RehearsalRequest, rehearse
from prefect_rlhf.rlhf_tasks.spec import SaveNode, SaveSamplesNode
from tests.rlhf_tasks.protocol.plans import small_plan
from tests.rlhf_tasks.settings import with_limits

SECONDS = {
    "to_generate": 1.0,
    "generate": 8.0,
    "release": 0.0,
    "values": 2.0,
    "actor_train": 6.0,
    "save_actor": 1.0,
    "critic_train": 4.0,
    "save_critic": 1.0,
}
"""Node of the small plan -> seconds. The critic's device has 16 s of work, the actor's have 16, too."""
ITERATION_S = 16.0


def costs_of(
    plan, seconds, part_bytes=0.0, read_bytes: float | dict[int, float] = 0.0, iteration_s=ITERATION_S
):
    """What a plan costs whose parts of snapshots are all as large. read_bytes: of every rank, or rank -> bytes."""
    every = read_bytes if isinstance(read_bytes, dict) else dict.fromkeys(range(plan.n_devices), read_bytes)
    return Costs(
        node_s=seconds,
        copy_s={},
        saved_bytes={
            node.name: dict.fromkeys(node.writers, part_bytes)
            for node in plan.nodes
            if isinstance(node, SaveNode | SaveSamplesNode)
        },
        read_bytes=every,
        iteration_s=iteration_s,
    )


def request(
    plan=None,
    *,
    seconds=SECONDS,
    part_bytes=0.0,
    read_bytes: float | dict[int, float] = 0.0,
    iterations=20,
    hours=24.0,
    faults=(),
    noise=0.0,
    seed=0,
    keep_last=2,
    leaps=False,
    machines=None,
    smaller=None,
    **spec,
):
    """What is to be rehearsed of a plan; default: of the small one."""
    plan = plan or small_plan()
    told = RunSpec(
        run="r",
        attempt=1,
        ranks=tuple(f"rank-{rank}" for rank in range(plan.n_devices)),
        plan=plan,
        config={},
        run_folder="",
        iterations=iterations,
        **with_limits(spec),
    )
    return RehearsalRequest(
        told,
        costs_of(plan, seconds, part_bytes, read_bytes),
        machines or Machines(),
        Noise(seed, noise),
        keep_last,
        hours,
        faults,
        leaps,
        smaller,
    )


def rehearsed(plan=None, **options):
    """Rehearse a plan, as `request` has it."""
    return rehearse(request(plan, **options))


def quick(plan, iterations):
    """A plan whose nodes all take a moment, and whose parts of snapshots are written at once."""
    seconds = dict.fromkeys((node.name for node in plan.nodes), 0.01)
    return request(plan, seconds=seconds, iterations=iterations, hours=1.0)
