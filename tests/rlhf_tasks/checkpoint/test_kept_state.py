"""A changed plan's state goes from rank to rank, and through the commit where a rank no longer has its part."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flows.run.prepare import prepare
from rlhf_tasks.algorithms.examples import prepared_rows
from rlhf_tasks.checkpoint.commits import RunSnapshots, step_folder
from rlhf_tasks.checkpoint.kept_state import KeptState
from rlhf_tasks.protocol.instructions import WriteCommit
from rlhf_tasks.protocol.messages import GenerationSpec, RunSpec
from rlhf_tasks.protocol.sequencer import Sequencer
from rlhf_tasks.rank.executor import NodeExecutor
from rlhf_tasks.spec import CallNode, ExecutionPlan, SaveNode, SyncNode
from tests import rendezvous
from tests.ppo_calls import PPO_CALLS
from tests.rlhf_tasks.settings import DEADLINES, limits
from tests.tiny_runs import TWO_RANKS, ppo_config

LATER = {call: {"devices": [1]} for call in PPO_CALLS} | {
    "actor_train": {"devices": [0, 1], "tp": 2},
    "critic_train": {"devices": [0, 1], "dp": 2},
    "ref_inference": {"devices": [1, 0], "dp": 2},
}
"""The actor goes from rank 0 to both by tensor parallelism, the critic from rank 1, and the reference from rank 0, to
both by ZeRO."""


class Rank:
    """One rank's executor, which is led through generations of one attempt."""

    def __init__(self, rank: int, documents: dict) -> None:
        self.rank, self.parts = rank, []
        self.run = RunSpec.model_validate(documents["run"])
        self.plans = [ExecutionPlan.model_validate(plan) for plan in documents["plans"]]
        self.folder = Path(self.run.run_folder)
        self.store = rendezvous.store()
        self.executor = NodeExecutor(rank, self.parts.append)

    def load(
        self, generation: int, step: int | None, attempt: int = 1, n_ranks: int = 2, plan: int = 1
    ) -> None:
        self.executor.load(
            GenerationSpec(
                run=self.run.run,
                attempt=attempt,
                generation=generation,
                rank=self.rank,
                n_ranks=n_ranks,
                plan=self.plans[0 if step is None else plan],
                config=self.run.config,
                run_folder=self.run.run_folder,
                restore_step=step,
                iterations=2,
                store_host="127.0.0.1",
                store_port=rendezvous.port,
                store_prefix=f"{rendezvous.prefix}/generation-{generation}",
                timeout_s=120.0,
            )
        )

    def train(self) -> None:
        """Iteration 0. Between a change of a role and its save node there is nothing to keep: no commit is like
        that."""
        sequencer, unsaved = Sequencer(self.plans[0], self.run.run, 1, DEADLINES), set()
        for request in sequencer.requests(0)[self.rank]:
            node = self.plans[0].node(request.key.node)
            self.executor.execute(request, node)
            if isinstance(node, SyncNode) or (isinstance(node, CallNode) and node.trains):
                unsaved.add(node.role if isinstance(node, SyncNode) else node.call.role)
            if isinstance(node, SaveNode):
                unsaved.remove(node.role)
            assert self.executor._run.keep() is None or not unsaved
        assert self.executor._run.keep() is not None

    def commit(self) -> None:
        """Make the parts of step 1 a commit, when both ranks have written theirs."""
        parts = {part.role: part.details for part in self.parts if part.step == 1}
        self.store.set(f"parts-{self.rank}", json.dumps(parts))
        if self.rank == 0:
            told = {rank: json.loads(self.store.get(f"parts-{rank}")) for rank in (0, 1)}
            saved = {
                f"save_{role}": {rank: details for rank in told if (details := told[rank].get(role))}
                for role in sorted({role for parts in told.values() for role in parts})
            }
            versions = {name.removeprefix("save_"): 1 for name in saved}
            order = WriteCommit(1, (), saved, 16, versions, self.plans[0])
            RunSnapshots(self.run).commit(order, {})
        self.meet("committed")

    def meet(self, where: str) -> None:
        """Wait for the other rank."""
        self.store.set(f"{where}-{self.rank}", "here")
        self.store.wait([f"{where}-{rank}" for rank in (0, 1)])

    def loads_as(self, generation: int, kept, **changes) -> dict:
        """What the rank holds when it has loaded the commit in a new generation, having kept something before."""
        self.executor._kept = kept
        self.load(generation, 1, **changes)
        held = self.holds()
        self.executor.close(keep_state=True)
        assert self.executor._kept is None, "what was restored and not saved lies otherwise than the commit"
        return held

    def holds(self) -> dict:
        """What this rank's roles that change are: state by name, version, steps, and the role's own state."""
        found = {}
        for role, engine in self.executor._run._engines.changing():
            found[role] = (engine.version, engine.master.step, dict(engine.state))
            for shard in engine.master.shard_state():
                found[role, shard.name, shard.kind] = (shard.start, shard.tensor.tolist())
            for name, weight in engine.stage.named_parameters():
                found[role, name] = weight.tolist()
        return found


def spoiled(kept: KeptState) -> KeptState:
    """Whoever goes by it shows it."""
    shards = {
        role: [shard._replace(tensor=torch.zeros_like(shard.tensor)) for shard in shards]
        for role, shards in kept.shards.items()
    }
    return kept._replace(shards=shards)


@contextmanager
def files_hidden(rank: Rank, name: str):
    """While the commit has its manifest alone."""
    folder, aside = step_folder(rank.folder, 1), rank.folder / "aside"

    def move(source: Path, destination: Path) -> None:
        if rank.rank == 0:
            for path in source.glob("*.safetensors"):
                shutil.move(path, destination / path.name)

    aside.mkdir(exist_ok=True)
    rank.meet(f"{name} before")
    move(folder, aside)
    rank.meet(f"{name} moved")
    yield
    rank.meet(f"{name} after")
    move(aside, folder)
    rank.meet(f"{name} back")


def change_the_plan(number: int, world: int, documents: dict) -> dict[str, bool]:
    """What of a way of loading the commit gives on this rank what its files give."""
    dist.destroy_process_group()
    rank = Rank(number, documents)
    rank.load(0, None)
    rank.train()
    rank.executor.close(keep_state=True)
    kept = rank.executor._kept
    rank.commit()
    read, alone = rank.loads_as(1, None), rank.loads_as(2, None, plan=2)
    same = {}
    with files_hidden(rank, "exchange"):
        same["from rank to rank"] = rank.loads_as(3, kept) == read
        same["to rank 0 alone"] = rank.loads_as(4, kept, plan=2) == alone
    same["one rank lacks its part"] = rank.loads_as(5, None if number else spoiled(kept)) == read
    same["of another attempt"] = rank.loads_as(6, spoiled(kept), attempt=2) == read
    same["of another step"] = rank.loads_as(7, spoiled(kept)._replace(step=0)) == read
    if number == 0:
        same["without the rank that trained the critic"] = rank.loads_as(8, kept, n_ranks=1, plan=2) == alone
    return same


def after_an_abort(number: int, world: int, documents: dict) -> bool:
    """Whether anything is kept of a generation that was aborted."""
    dist.destroy_process_group()
    rank = Rank(number, documents)
    rank.load(0, None)
    assert rank.executor._run.keep() is not None
    rank.executor._aborted = True
    rank.executor.close(keep_state=True)
    return rank.executor._kept is not None


WHOLE = {"sync_ref_model": True, "ref_model_sync_steps": 1}
ADAPTERS = {"lora": {"rank": 4}}


@pytest.fixture(
    params=[WHOLE, pytest.param(ADAPTERS, marks=pytest.mark.slow)],
    ids=["whole-reference-follows", "adapters"],
)
def documents(tmp_path, request) -> dict:
    """A run whose plans are TWO_RANKS, LATER, and all on rank 0; of models as a whole, or of adapters."""
    plans = []
    for plan in (TWO_RANKS, LATER, {call: {"devices": [0]} for call in PPO_CALLS}):
        n_devices = 1 if len(plans) == 2 else 2
        config = ppo_config(
            tmp_path,
            plan=plan,
            cluster={"devices_per_host": n_devices},
            dtype="float32",
            **request.param,
        )
        plans.append(prepare(config).plan)
    folder = tmp_path / "run"
    folder.mkdir()
    prepared_rows(config).keep(folder)
    run = RunSpec(
        run="test",
        attempt=1,
        ranks=("a", "b"),
        plan=plans[0],
        config=json.loads(config.model_dump_json()),
        run_folder=str(folder),
        iterations=2,
        limits=limits(),
    )
    return {"run": run.model_dump(mode="json"), "plans": [plan.model_dump(mode="json") for plan in plans]}


@pytest.mark.dist
def test_state_comes_from_the_ranks_bit_by_bit_and_from_the_commit_where_one_lacks_it(ranks, documents):
    for same in ranks.run(2, change_the_plan, documents):
        assert [way for way, is_same in same.items() if not is_same] == []


@pytest.mark.dist
def test_nothing_is_kept_of_an_aborted_generation(ranks, documents):
    assert ranks.run(2, after_an_abort, documents) == [False, False]
