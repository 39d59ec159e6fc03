"""A run with an environment loses a rank and is resumed: the same bits, and nothing committed is played again."""

import json
from collections import Counter

import numpy as np
import pytest
import yaml

from prefect_rlhf.rlhf_tasks.system.counter_random import counter_bits
from tests.committed import assert_same_run, last_step
from tests.flows.marked_command import outcome
from tests.rlhf_tasks.test_environments import PLAYED, grpo_config

ITERATIONS, STALENESS, BATCH = 4, 1, 16


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_what_a_commit_has_is_not_played_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def begin(name, *changes, **environment):
        played = {**PLAYED, "kwargs": {"counted": str(tmp_path / "played")}}
        config = grpo_config(
            tmp_path,
            environment=played,
            staleness=STALENESS,
            total_iterations=ITERATIONS,
            snapshot_every=1,
            beta=0.0,
            plan={
                "actor_generate": "0",
                "reward_inference": "0",
                "actor_train": "1",
            },
            cluster={"devices_per_host": 2},
        )
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
        arguments = ("run", "grpo", "--config", "run.yaml", f"name={name}", *changes)
        return outcome(tmp_path / f"{name}.log", *arguments, **environment)

    def seeds(iteration):
        ids = np.arange(iteration * BATCH, (iteration + 1) * BATCH)
        return counter_bits(0, "environment/rollout", iteration, ids, np.zeros(1, dtype=np.int64)).tolist()

    status, said = begin("undisturbed")
    assert status == 0, said
    every = [seed for iteration in range(ITERATIONS) for seed in seeds(iteration)]
    assert Counter(map(int, (tmp_path / "played").read_text().split())) == Counter(every)
    (tmp_path / "played").unlink()

    killed = {"PREFECT_RLHF_FAILPOINT": "trained:kill@rank1@iter2@gen0"}
    status, said = begin("ended", "max_restarts=0", **killed)
    assert status == 1, said
    ended = tmp_path / "runs" / "ended"
    committed = last_step(ended) + STALENESS  # iterations whose samples it has, or has learned from
    assert committed > STALENESS
    status, said = outcome(tmp_path / "resumed.log", "run", "grpo", "--resume", str(ended))
    assert status == 0, said
    assert_same_run(ended, tmp_path / "runs" / "undisturbed")
    found = Counter(map(int, (tmp_path / "played").read_text().split()))
    assert set(found) == set(every)
    assert {found[seed] for iteration in range(committed) for seed in seeds(iteration)} == {1}
