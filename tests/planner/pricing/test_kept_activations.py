"""The activations that a plan has room for are those that stand in memory until the backward pass."""

import gc
from functools import partial

import pytest
import torch
from transformers import LlamaConfig

from planner.plan.mesh import Cluster
from planner.plan.workload import Lengths
from rlhf_tasks.parallel.layout.shape import ModelShape, Recompute
from rlhf_tasks.parallel.layout.slices import Layout
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.model.stage import Stage
from tests.tiny_models import packed, tokens

LENGTHS = (128, 200, 184)
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 97,
    "max_position_embeddings": 512,
}


def tensors() -> list[torch.Tensor]:
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def kept_bytes(dtype: torch.dtype, recompute: Recompute, layers: int) -> int:
    """Bytes of all tensors, but for weights, that a forward pass of a model keeps."""
    config = LlamaConfig(**SIZES, num_hidden_layers=layers)
    place = Placement((0,), ParallelStrategy())
    layout = Layout(ModelShape.from_config(config.to_dict()), "lm", place)
    stage = Stage(
        config,
        layout,
        place.coordinate(0),
        None,
        device=torch.device("cpu"),
        dtype=dtype,
        recompute=recompute,
    )
    weights = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    micro = packed(tokens(*LENGTHS))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        before = tensors()  # held, so that no later tensor has the identity of one that is gone
        output = stage(micro.input_ids, micro, rows=None)
    del output
    there = set(map(id, before))
    for found in tensors():  # what a pass with selective recomputation keeps by itself
        if id(found) not in there:
            keep(found)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_further_layer_takes_what_it_keeps(ppo_cost, make_graph, assign, llama, dtype, recompute):
    def planned(layers: int) -> float:
        shape = llama(**SIZES, num_hidden_layers=layers)
        sizes = {"prompt_tokens": sum(LENGTHS) - 1, "new_tokens": Lengths.fixed(1)}
        model = ppo_cost(Cluster(1, 1), shape, itemsize=dtype.itemsize, recompute=recompute, **sizes)
        call = make_graph(n_seqs=1, mini_batches=1).call("actor_train")
        return model.call(call, assign([0])).active_bytes[0]

    measured = partial(kept_bytes, dtype, recompute)
    assert planned(3) - planned(2) == pytest.approx(measured(3) - measured(2), rel=0.02)
