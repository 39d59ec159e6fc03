"""PPO's graph and short ways to write assignments, shared by the planner's tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_rlhf.planner.plan.build import build_plan
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths, RoleModel, Workload
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.figures import MeasuredProfile
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.rlhf_tasks.algorithms.configurations import read_assignments
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora, linear_modules
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head, ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, ExecutionPlan
from tests.planner.sampled import ALL_FOR_TENSORS, as_measured

DEMO_PLAN = Path(__file__).parents[2] / "deployments/demo_plan.yaml"


@pytest.fixture
def make_graph() -> Callable[..., DataflowGraph]:
    def make(name: str = "ppo", n_seqs: int = 64, mini_batches: int = 2, **sizes: Any) -> DataflowGraph:
        config = {
            "batch_size": n_seqs,
            "group_size": 1,
            "num_mini_batches": mini_batches,
            "scoring_role": "reward",
            "on_reward_error": "stop",
            "scores_tokens": False,
            "roles": lambda: ("actor", "critic", "ref", "reward"),
            "records_kept": False,
            "truncated_responses": "keep",
            **sizes,
        }
        registered = algorithm(name)
        return DataflowGraph(registered.graph(SimpleNamespace(**config)), registered.dataset_keys, name=name)

    return make


@pytest.fixture
def assign() -> Callable[..., CallAssignment]:
    def make(
        devices: list[int], dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, **more
    ) -> CallAssignment:
        return CallAssignment(placement=Placement(tuple(devices), ParallelStrategy(dp, tp, pp, cp)), **more)

    return make


@pytest.fixture
def demo_assignments() -> dict[str, CallAssignment]:
    return read_assignments(DEMO_PLAN, 4)


@pytest.fixture
def demo_plan(make_graph, demo_assignments) -> ExecutionPlan:
    return build_plan(make_graph(n_seqs=256), demo_assignments, Cluster(1, 4))


@pytest.fixture
def llama() -> Callable[..., ModelShape]:
    """A Llama's shape; by default Llama-2 7B."""

    def make(**changes) -> ModelShape:
        config = {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 11008,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
        }
        return ModelShape.from_config({**config, **changes})

    return make


@pytest.fixture
def tiny(llama):
    return llama(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        vocab_size=260,
    )


@pytest.fixture
def lora(llama) -> Lora:
    """Adapters of rank 16 on all linear layers."""
    return Lora(16, 32.0, tuple(linear_modules(llama())))


@pytest.fixture
def sampled(tiny):
    """sampled(scale=1): a profile as if measured on 1 x 4 slots so many times slower than CPU slots."""

    def make(scale: float = 1.0) -> MeasuredProfile:
        return as_measured(tiny, Cluster(1, 4), scale)

    return make


@pytest.fixture
def ppo_cost(llama) -> Callable[..., CostModel]:
    """The cost of PPO with one shape for all roles on A100s; 128 prompt and 128 new tokens.

    With lora, actor and critic train adapters, on the weights of ref and reward.
    """

    def make(
        cluster: Cluster,
        shape: ModelShape | None = None,
        device=None,
        lora: Lora | None = None,
        **workload,
    ) -> CostModel:
        shape = shape or llama()
        heads: dict[str, Head] = {"actor": "lm", "ref": "lm", "critic": "scalar", "reward": "scalar"}
        models = {
            role: RoleModel(
                shape=shape,
                head=head,
                lora=lora if role in ("actor", "critic") else None,
                weights=head if lora else "",
            )
            for role, head in heads.items()
        }
        sizes = {"prompt_tokens": 128, "new_tokens": Lengths.fixed(128), "itemsize": 2, "recompute": "full"}
        return CostModel(cluster, device or preset("a100-80g-sxm"), models, Workload(**(sizes | workload)))

    return make


@pytest.fixture
def small_problem(make_graph, ppo_cost, llama) -> Callable[..., Problem]:
    """PPO, or some of its calls, with 0.05 billion parameters per model and few options, on A100s."""

    def make(
        cluster: Cluster,
        calls: Sequence[str] | None = None,
        max_tp: int | None = None,
        memory: float = 80e9,
        n_seqs: int = 4,
        links_slower: float = 1.0,
        lora: Lora | None = None,
        host_memory: float | None = None,
    ) -> Problem:
        graph = make_graph(n_seqs=n_seqs, mini_batches=2)
        if calls is not None:
            kept = [graph.call(name) for name in calls]
            made = {*graph.dataset_keys, *(key for call in kept for key in call.outputs)}
            kept = [c.model_copy(update={"inputs": tuple(k for k in c.inputs if k in made)}) for c in kept]
            graph = DataflowGraph(kept, graph.dataset_keys, name="small")
        shape = llama(
            hidden_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=2048,
            vocab_size=8192,
        )
        figures = {"memory_bytes": int(memory), "host_memory_bytes": host_memory and int(host_memory)}
        device = preset("a100-80g-sxm").model_copy(update={**figures, "dispatch_s": 1e-4, **ALL_FOR_TENSORS})
        links = {
            name: link.model_copy(update={"bytes_per_s": link.bytes_per_s / links_slower})
            for name, link in (("inside_host", device.inside_host), ("between_hosts", device.between_hosts))
        }
        device = device.model_copy(update=links)
        return Problem(graph, ppo_cost(cluster, shape, device, lora), max_tp)

    return make
