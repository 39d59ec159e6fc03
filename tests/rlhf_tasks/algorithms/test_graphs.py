import subprocess
import sys
from types import SimpleNamespace

import pytest

from rlhf_tasks.algorithms.graphs import GRAPHS

SIZES = SimpleNamespace(
    batch_size=12,
    num_mini_batches=3,
    scoring_role="reward",
    records_kept=False,
    truncated_responses="keep",
)


@pytest.mark.parametrize("algorithm", GRAPHS)
def test_sizes_come_from_the_configuration(algorithm):
    calls = GRAPHS[algorithm].calls(SIZES)
    assert {call.n_seqs for call in calls} == {12}
    assert all(call.mini_batches == (3 if call.kind == "train_step" else 1) for call in calls)


def test_ppo_without_a_reward_model_scores_on_another_role():
    calls = GRAPHS["ppo"].calls(SimpleNamespace(**{**vars(SIZES), "scoring_role": "ref"}))
    assert next(call for call in calls if call.name == "reward_inference").role == "ref"


def test_graphs_load_no_torch():
    heavy = ("torch", "prefect", "distributed")
    code = f"import sys, rlhf_tasks.algorithms.graphs; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
