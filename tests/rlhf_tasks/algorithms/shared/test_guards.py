"""An anomaly of a train call stops the run, leaves out the update or is only said: on all ranks alike, under every
layout."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.algorithms.functions import load_functions
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext
from prefect_rlhf.rlhf_tasks.algorithms.shared.guards import AnomalyError, are_equal
from prefect_rlhf.rlhf_tasks.checkpoint.dumps import dumps_of
from prefect_rlhf.rlhf_tasks.parallel.batch.redistribution import share_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import partition
from prefect_rlhf.rlhf_tasks.rank.anomalies import train
from tests.rlhf_tasks.algorithms.test_layouts import N_SEQS, config_of, engine_on, samples

BAD = (1, 2)
"""The iterations with an anomaly; those before and after them have none."""

OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"num_ppo_epochs": 2, "early_stop_ratio": None},
    "grpo": {"num_generations": 2, "beta": 0.1, "num_mini_batches": 1, "num_iterations": 2},
}
BOUNDS: dict[str, dict[str, Any]] = {
    "not finite": {},
    "kl": {"kl_bound": 8.0},
    "equal rewards": {"equal_rewards_iterations": 2},
}
ACTIONS = ("stop", "skip", "warn")


def with_anomaly(whole: SampleBatch, anomaly: str) -> SampleBatch:
    key = "scores" if anomaly == "equal rewards" else "ref_logprobs"
    packed = whole[key]
    values = packed.values.clone()
    if anomaly == "not finite":
        values[packed.lengths[0] - 1] = torch.nan  # of one sample, on one replica
    elif anomaly == "kl":
        values -= 5.0
    else:
        values.fill_(0.5)
    return SampleBatch(whole.ids, {**whole.data, key: Packed(values, packed.lengths)})


def runs(rank: int, world: int, kind: str, strategy: tuple[int, ...], folder: str) -> list[Any]:
    """Of each anomaly and action, the iterations of a run: (steps, whether no bit of the state changed, loss, state).

    A run that stops ends with the error's sentence and whether there is a dump.
    """
    torch.set_num_threads(1)
    seen: list[Any] = []
    for anomaly, action in product(BOUNDS, ACTIONS):
        engine, place = engine_on(rank, strategy, "lm"), Path(folder, f"{anomaly} {action}")
        config = config_of(kind, OPTIONS[kind] | BOUNDS[anomaly] | {"on_anomaly": action})
        call = next(call for call in algorithm(kind).calls(config) if call.name == "actor_train")
        sound = samples(kind).select(*call.inputs)
        function = load_functions(algorithm(kind), [call.name])[call.name]
        of_run: list[Any] = []
        for iteration in range(4):
            whole = with_anomaly(sound, anomaly) if iteration in BAD else sound
            whole = SampleBatch(tuple(N_SEQS * iteration + i for i in whole.ids), whole.data)
            dealt = partition(
                whole.ids, strategy[0], "count", config.num_mini_batches, None, config.group_size
            )
            mine = whole.reorder(dealt[engine.coordinate.dp]) if engine.is_head else None
            batch = share_batch(mine, engine.placement, engine.groups)
            before = [shard.tensor.clone() for shard in engine.optimizer.shard_state()]
            nothing: Any = SimpleNamespace()
            context = CallContext(
                config, iteration, N_SEQS * iteration, N_SEQS, 2, nothing, nothing, place, str, tuple
            )
            try:
                metrics = train(function, engine, call, batch, context, "test").metrics
            except AnomalyError as error:
                of_run.append(
                    (str(error), len(dumps_of(place, "actor")), [p.name for p in place.glob("*/*.tmp")])
                )
                break
            after = [shard.tensor for shard in engine.optimizer.shard_state()]
            unchanged = all(map(torch.equal, before, after))
            state = {
                key: engine.state[key] for key in ("skipped_calls", "equal_rewards") if key in engine.state
            }
            of_run.append((metrics["policy/steps"], unchanged, metrics["loss/policy"], state))
        seen.append((anomaly, action, of_run, len(dumps_of(place, "actor"))))
    return seen


@pytest.mark.dist
@pytest.mark.parametrize(("kind", "n_steps"), [("ppo", 4), ("grpo", 2)])
def test_every_layout_decides_alike_and_a_skipped_update_changes_no_bit(ranks, tmp_path, kind, n_steps):
    losses = {}
    for strategy in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]:
        size = strategy[0] * strategy[1] * strategy[2]
        folder = tmp_path / "x".join(map(str, strategy))
        for seen in ranks.run(size, runs, kind, strategy, str(folder)):
            for anomaly, action, of_run, n_dumps in seen:
                case = (strategy, anomaly, action)
                first = 2 if anomaly == "equal rewards" else 1
                assert n_dumps == 1, (case, "of the first anomaly, and no other")
                assert [steps for steps, *_ in of_run[:first]] == [n_steps] * first, case
                if action == "stop":
                    sentence, written, unfinished = of_run[first]
                    assert f"iteration {first}: " in sentence, case
                    helps = "skip" if anomaly == "not finite" else "warn"
                    assert f"or resume with on_anomaly={helps}." in sentence, case
                    assert ("Raise kl_bound" in sentence) == (anomaly == "kl"), case
                    assert (
                        f"prefect-rlhf replay {folder / f'{anomaly} {action}'}/anomalies/actor-iteration-"
                        in sentence
                    )
                    assert (written, unfinished, len(of_run)) == (1, [], first + 1), case
                    continue
                skips = action == "skip" or anomaly == "not finite"
                for number, (steps, unchanged, loss, state) in enumerate(of_run):
                    skipped = skips and number in BAD and number >= first
                    assert (steps, unchanged) == ((0, True) if skipped else (n_steps, False)), (case, number)
                    equal = {"equal_rewards": number} if anomaly == "equal rewards" and number in BAD else {}
                    calls = {"skipped_calls": number - first + 1} if skipped else {}
                    assert state == calls | equal, (case, number)
                    known = losses.setdefault((anomaly, action, number), loss)
                    assert loss == pytest.approx(known, rel=1e-9, abs=1e-12, nan_ok=True), (case, number)


def test_scores_are_equal_over_replicas_and_those_without_a_score_do_not_count():
    assert are_equal([2.0, 0.5, 0.5, 0.0, 0.0, 0.0, 3.0, 0.5, 0.5])
    assert not are_equal([2.0, 0.5, 0.5, 3.0, 0.5, 0.75])
    assert not are_equal([1.0, torch.nan, torch.nan])
    assert not are_equal([0.0, 0.0, 0.0])
