"""The activations that a plan has room for are those that stand in memory until the backward pass."""

import gc
from functools import partial

import pytest
import torch
from transformers import GPT2Config, GptOssConfig, LlamaConfig, MixtralConfig, PreTrainedConfig

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape, Recompute
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
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


@pytest.fixture(scope="module", autouse=True)
def only_new_objects() -> None:
    """What is older is not looked at each time: it is never among what a pass keeps."""
    gc.collect()
    gc.freeze()


def tensors() -> list[torch.Tensor]:
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def config_of(family: str, layers: int) -> PreTrainedConfig:
    kinds = {"llama": LlamaConfig, "mixtral": MixtralConfig, "gpt2": GPT2Config, "gpt_oss": GptOssConfig}
    return kinds[family](**SIZES, num_hidden_layers=layers)


def kept_bytes(
    family: str, dtype: torch.dtype, recompute: Recompute, layers: int, lengths: tuple[int, ...] = LENGTHS
) -> int:
    """Bytes of all tensors, but for weights, that a forward pass of a model keeps."""
    config = config_of(family, layers)
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

    micro = packed(tokens(*lengths))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        before = tensors()  # held, so that no later tensor has the identity of one that is gone
        output = stage(micro.input_ids, micro, rows=None)
    there = set(map(id, before))
    for (
        found
    ) in tensors():  # what a pass with selective recomputation keeps by itself, as long as there is an output
        if id(found) not in there:
            keep(found)
    del output
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_a_further_layer_takes_what_it_keeps(
    ppo_cost, make_graph, assign, monkeypatch, family, dtype, recompute
):
    # as on devices where nothing pads the experts' rows, and whose attention converts nothing
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.parallel.model.stage.ROWS", 1)
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.parallel.model.attention.LONGEST_IN_FLOAT32", 0)
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.parallel.model.attention.widens", lambda *_: False)

    def planned(layers: int) -> float:
        shape = ModelShape.from_config(config_of(family, layers).to_dict())
        sizes = {"prompt_tokens": sum(LENGTHS) - 1, "new_tokens": Lengths.fixed(1)}
        model = ppo_cost(Cluster(1, 1), shape, itemsize=dtype.itemsize, recompute=recompute, **sizes)
        call = make_graph(n_seqs=1, mini_batches=1).call("actor_train")
        return model.call(call, assign([0])).active_bytes[0]

    measured = partial(kept_bytes, family, dtype, recompute)
    assert planned(3) - planned(2) == pytest.approx(measured(3) - measured(2), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_with_sinks_take_what_they_keep(ppo_cost, make_graph, assign, monkeypatch, dtype):
    """They grow with the square of a sequence's length; all else that a layer keeps grows with the length."""

    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.parallel.model.stage.ROWS", 1)

    def planned(layers: int, length: int) -> float:
        config = config_of("gpt_oss", layers)
        shape = ModelShape.from_config(config.to_dict())
        sizes = {"prompt_tokens": length - 1, "new_tokens": Lengths.fixed(1)}
        model = ppo_cost(Cluster(1, 1), shape, itemsize=dtype.itemsize, recompute="none", **sizes)
        call = make_graph(n_seqs=1, mini_batches=1).call("actor_train")
        return model.call(call, assign([0])).active_bytes[0]

    def measured(layers: int, length: int) -> float:
        return kept_bytes("gpt_oss", dtype, "none", layers, (length,))

    by_plan, by_torch = (
        kept(3, 512) - kept(2, 512) - 2 * (kept(3, 256) - kept(2, 256)) for kept in (planned, measured)
    )
    assert by_plan == pytest.approx(by_torch, rel=0.02)
