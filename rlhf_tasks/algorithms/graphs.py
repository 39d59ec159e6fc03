"""The registered algorithms' dataflow graphs, by the name that a configuration's `type` gives. Torch-free."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rlhf_tasks.algorithms import grpo_graph, ppo_graph, reward_model_graph, rollout_graph, sft_graph
from rlhf_tasks.spec import ModelFunctionCall


class AlgorithmGraph(NamedTuple):
    """calls(config) -> the model function calls of one iteration; dataset_keys: what `fetch` provides."""

    calls: Callable[[Any], list[ModelFunctionCall]]
    dataset_keys: tuple[str, ...]


GRAPHS: dict[str, AlgorithmGraph] = {
    "ppo": AlgorithmGraph(ppo_graph.graph, ppo_graph.DATASET_KEYS),
    "grpo": AlgorithmGraph(grpo_graph.graph, grpo_graph.DATASET_KEYS),
    "sft": AlgorithmGraph(sft_graph.graph, sft_graph.DATASET_KEYS),
    "reward_model": AlgorithmGraph(reward_model_graph.graph, reward_model_graph.DATASET_KEYS),
    "rollout": AlgorithmGraph(rollout_graph.graph, rollout_graph.DATASET_KEYS),
}
