"""The code in docs/extending.md does what the page says."""

import re
from pathlib import Path
from types import SimpleNamespace

from planner.plan.build import build_plan
from planner.plan.graph import DataflowGraph
from planner.plan.mesh import Cluster
from planner.search.heuristic import Limits, heuristic
from rlhf_tasks.parallel.layout.shape import FAMILIES
from rlhf_tasks.rewards.forms import Answers, TrainerState, load_reward

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
REWARD, GRAPH, FAMILY = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_reward_is_found_and_judges(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARD)
    reward = load_reward("brief", f"{tmp_path / 'rewards.py'}:brief", {"most": 8})
    answers = Answers(["p"] * 3, ["yes", "no", "yes, indeed"], [[0]] * 3, {"answer": ["yes"] * 3}, ["p"] * 3)
    (arguments,) = reward.arguments(answers, TrainerState(0, 1), {})
    assert reward.values([reward.function(**arguments)], 3) == [1.0, 0.0, 0.0]


def test_the_graph_gets_a_plan():
    names: dict = {}
    exec(GRAPH, names)
    calls = names["graph"](SimpleNamespace(batch_size=8, num_mini_batches=2))
    graph = DataflowGraph(calls, names["DATASET_KEYS"], name="expert_iteration")
    limits = {role: Limits(max_tp=4, max_pp=4) for role in ("actor", "reward")}
    plan = build_plan(graph, heuristic(graph, Cluster(1, 2), limits), Cluster(1, 2))
    order = [node.name for node in plan.nodes]
    assert [name for name in order if name in {call.name for call in calls}] == [call.name for call in calls]
    assert {"fetch", "save_actor"} <= set(order)


def test_the_family_is_the_one_that_the_page_names():
    names: dict = {}
    exec(FAMILY, names)
    assert names["qwen2"] == FAMILIES["qwen2"]
