"""A changed plan's state goes from rank to rank, and through the commit where a rank no longer has its part."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from flows.prepare import prepare
from rlhf_tasks.checkpoint import RunSnapshots, step_folder
from rlhf_tasks.executor import Executor
from rlhf_tasks.protocol.instructions import WriteCommit
from rlhf_tasks.protocol.sequencer import Sequencer
from rlhf_tasks.spec import ExecutionPlan, SaveNode
from rlhf_tasks.transport import GenerationSpec, RunSpec
from tests.ppo_calls import PPO_CALLS
from tests.tiny_runs import TWO_RANKS, ppo_config

LATER = {call: {"devices": [1]} for call in PPO_CALLS} | {
    "actor_train": {"devices": [0, 1], "tp": 2},
    "critic_train": {"devices": [0, 1], "dp": 2},
}
"""The actor goes from rank 0 to both by tensor parallelism, the critic from rank 1 to both by ZeRO."""


class Rank:
    """One rank's executor, which is led through generations of one attempt."""

    def __init__(self, rank: int, documents: dict, port: int) -> None:
        self.rank, self.parts = rank, []
        self.run = RunSpec.model_validate(documents["run"])
        self.plans = [ExecutionPlan.model_validate(plan) for plan in documents["plans"]]
        self.folder = Path(self.run.run_folder)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
        self.executor = Executor(rank, self.parts.append)

    def load(self, generation: int, step: int | None, attempt: int = 1) -> None:
        self.executor.load(
            GenerationSpec(
                run=self.run.run,
                attempt=attempt,
                generation=generation,
                rank=self.rank,
                n_ranks=2,
                plan=self.plans[step or 0],
                config=self.run.config,
                run_folder=self.run.run_folder,
                restore_step=step,
                iterations=2,
                snapshot_every=1,
                store_host="127.0.0.1",
                store_port=self.store.port,
                store_prefix=f"generation-{generation}",
                timeout_s=120.0,
            )
        )

    def train(self) -> None:
        """Iteration 0. Between training and the save node there is nothing to keep: no commit is like that."""
        sequencer, trained = Sequencer(self.plans[0], self.run.run, 1), False
        for request in sequencer.requests(0)[self.rank]:
            node = self.plans[0].node(request.key.node)
            self.executor.execute(request, node)
            trained = (trained or getattr(node, "trains", False)) and not isinstance(node, SaveNode)
            assert (self.executor._run.keep() is None) == trained

    def commit(self) -> None:
        """Make the parts of step 1 a commit, when both ranks have written theirs."""
        parts = {part.role: part.details for part in self.parts if part.step == 1}
        self.store.set(f"parts-{self.rank}", json.dumps(parts))
        if self.rank == 0:
            told = {rank: json.loads(self.store.get(f"parts-{rank}")) for rank in (0, 1)}
            saved = {
                f"save_{role}": {rank: details for rank in told if (details := told[rank].get(role))}
                for role in ("actor", "critic")
            }
            order = WriteCommit(1, (), saved, 16, {"actor": 1, "critic": 1}, self.plans[0])
            RunSnapshots(self.run).commit(order, {})
        self.meet("committed")

    def meet(self, where: str) -> None:
        """Wait for the other rank."""
        self.store.set(f"{where}-{self.rank}", "here")
        self.store.wait([f"{where}-{rank}" for rank in (0, 1)])

    def spoil(self) -> None:
        """Whoever goes by what is kept shows it."""
        for shards in self.executor._kept.shards.values() if self.executor._kept else ():
            for shard in shards:
                shard.tensor.zero_()

    def holds(self) -> dict:
        """What this rank's trained roles are: state by name, version, steps, and the role's own state."""
        found = {}
        for role, engine in self.executor._run._engines.trained():
            found[role] = (engine.version, engine.optimizer.step, dict(engine.state))
            for shard in engine.optimizer.shard_state():
                found[role, shard.name, shard.kind] = (shard.start, shard.tensor.tolist())
            for name, weight in engine.stage.named_slices().items():
                found[role, name] = weight.tolist()
        return found


def without_files(rank: Rank, action) -> None:
    """Do something while the commit has its manifest alone."""
    folder, aside = step_folder(rank.folder, 1), rank.folder / "aside"
    rank.meet("before")
    if rank.rank == 0:
        aside.mkdir()
        for path in folder.glob("*.safetensors"):
            shutil.move(path, aside)
    rank.meet("moved")
    action()
    rank.meet("after")
    if rank.rank == 0:
        for path in aside.iterdir():
            shutil.move(path, folder)
    rank.meet("back")


def change_the_plan(number: int, world: int, documents: dict, port: int) -> tuple[bool, bool]:
    """(state from rank to rank equals the commit's, so does it where one rank lacks its part), on this rank."""
    dist.destroy_process_group()
    rank = Rank(number, documents, port)
    rank.load(0, None)
    rank.train()
    rank.executor.close(keep_state=True)
    rank.commit()
    without_files(rank, lambda: rank.load(1, 1))
    moved = rank.holds()
    rank.executor.close(keep_state=number == 0)
    rank.spoil()
    rank.load(2, 1)
    lacked = rank.holds()
    rank.executor.close(keep_state=True)
    rank.spoil()
    rank.load(3, 1, attempt=2)
    read = rank.holds()
    rank.executor.close(keep_state=False)
    return moved == read, lacked == read


@pytest.mark.dist
def test_state_comes_from_the_ranks_bit_by_bit_and_from_the_commit_where_one_lacks_it(ranks, tmp_path):
    plans = []
    for plan in (TWO_RANKS, LATER):
        config = ppo_config(tmp_path, plan=plan, cluster={"devices_per_host": 2}, dtype="float32")
        plans.append(prepare(config).plan)
    folder = tmp_path / "run"
    folder.mkdir()
    run = RunSpec(
        run="test",
        attempt=1,
        ranks=("a", "b"),
        plan=plans[0],
        config=json.loads(config.model_dump_json()),
        run_folder=str(folder),
        iterations=2,
    )
    documents = {
        "run": run.model_dump(mode="json"),
        "plans": [plan.model_dump(mode="json") for plan in plans],
    }
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks.run(2, change_the_plan, documents, store.port) == [(True, True)] * 2
