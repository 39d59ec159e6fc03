"""Stages against plain transformers: logits, values and gradients, whole and split over tp and pp."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from prefect_rlhf.rlhf_tasks.doctor import difference, plain_logits, weigh
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head, Recompute
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Coordinate, ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.model.products import products
from prefect_rlhf.rlhf_tasks.parallel.model.stage import ROWS, Stage, check_model
from tests.tiny_models import (
    CONFIGS,
    GEMMA4,
    SIZES,
    by_our_names,
    fill,
    of_tensor,
    packed,
    shape_of,
    stored_buffers,
    tiny_config,
    tiny_model,
    tokens,
)

CPU = torch.device("cpu")
LENGTHS = (5, 9, 1, 7)
# Largest relative difference of float32 gradients. Those of key biases are what is left of large terms that cancel:
# other orders of summation, which processors choose, change their fifth digit.
GRADIENT = 3e-5


def build(config, model: nn.Module, placement: Placement, device: int, head: Head = "lm", **kwargs) -> Stage:
    """The stage of one device, with its slices of a whole model."""
    kwargs = {"tp_group": None, "device": CPU, "dtype": torch.float32, **kwargs}
    layout = Layout(shape_of(config), head, placement)
    stage = Stage(config, layout, placement.coordinate(device), **kwargs)
    fill(stage, model)
    return stage


def gradients_of(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    constant = {name: torch.zeros_like(tensor) for name, tensor in stored_buffers(model).items()}
    return by_our_names(layout, model, constant | {name: p.grad for name, p in model.named_parameters()})


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Zeros for what no gradient changes."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def reference(model: nn.Module, head: Head, sequences: list[Tensor]) -> Tensor:
    """What transformers gives for each sequence alone, concatenated."""
    if head == "lm":
        return torch.cat(plain_logits(model, sequences))
    whole: Any = model
    return torch.cat([whole.score(whole.base_model(s[None])[0])[0, :, 0] for s in sequences])


def assert_close(
    ours: Tensor, theirs: Tensor, tolerance: float, what: str = "", of: Tensor | None = None
) -> None:
    gap = difference(ours, theirs, of)
    assert gap < tolerance, f"{what}: relative difference {gap:.2e}"


def pipeline(config, model: nn.Module, pp: int, head: Head = "lm", **kwargs) -> list[Stage]:
    """All stages of a pipeline in this process."""
    placement = Placement(tuple(range(pp)), ParallelStrategy(pp=pp))
    return [build(config, model, placement, device, head, **kwargs) for device in range(pp)]


def run(stages: list[Stage], sequences: list[Tensor]) -> Tensor:
    micro = packed(sequences)
    x = micro.input_ids
    for stage in stages:
        x = stage(x, micro)
    return x


# One process


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("head", "tied"), [("lm", False), ("lm", True), ("scalar", False)])
def test_a_pipeline_equals_transformers(family: str, head: Head, tied: bool):
    """Logits, or a value per token, and all gradients."""
    config = tiny_config(family, tie_word_embeddings=tied)
    model, sequences = tiny_model(config, head), tokens(*LENGTHS)
    theirs = reference(model, head, sequences)
    columns = theirs.shape[1] if head == "lm" else 1
    weigh(theirs, 0, columns).backward()
    stages = pipeline(config, model, 4 if tied else 2, head)
    ours = run(stages, sequences)
    assert ours.shape == theirs.shape
    assert_close(ours, theirs, 1e-5)
    weigh(ours, 0, columns).backward()
    layout = stages[0].layout
    expected = gradients_of(model, layout)
    for name, gradient in expected.items():
        holders = [gradient_of(s.get_parameter(name)) for s in stages if name in s.named_slices()]
        assert len(holders) == (2 if tied and "embed_tokens." in name else 1)
        assert_close(sum(holders), gradient, GRADIENT, name, of_tensor(layout, expected, name))


ROPE: dict[str, Any] = {"rope_theta": 1e4}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
OF_LAYER_TYPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope_parameters": {**ROPE, "rope_type": "llama3", **LLAMA3}}),
        ("qwen2", {"rope_parameters": {**ROPE, "rope_type": "yarn", **YARN}}),
        ("gemma3_text", {"rope_parameters": OF_LAYER_TYPES}),
        *(("gemma4_text", sizes) for sizes in GEMMA4.values()),
        ("gemma4_text", {"attention_bias": True}),
        ("gemma4_text", {"attention_k_eq_v": False}),
        ("gemma4_text", {"use_double_wide_mlp": False}),
        ("gemma4_text", {"num_kv_shared_layers": 1}),
        ("qwen3", {"attention_bias": True}),
        ("mistral", {"sliding_window": 3}),
        ("mixtral", {"sliding_window": 3}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen2_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}),
        # layers 0 and 2 slide, whose modules do not pass their window
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 3}),
        ("deepseek_v3", {"rope_parameters": {**ROPE, "rope_type": "yarn", **YARN, "mscale_all_dim": 1.0}}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"attention_bias": True}),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}),
        ("glm4_moe", {"norm_topk_prob": False, "topk_group": 3}),
        ("glm4_moe", {"first_k_dense_replace": 0, "use_qk_norm": False}),
        pytest.param(
            *("glm4_moe", {"n_shared_experts": 0}),
            marks=pytest.mark.filterwarnings("ignore:Initializing zero-element"),
        ),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 5}),
        # layers 2 and 3 slide: a stage that numbered its layers from 0 would let none of them
        ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
        ("gpt_oss", {"rope_parameters": {**ROPE, "rope_type": "yarn", **YARN, "truncate": False}}),
        ("gpt_oss", {"swiglu_alpha": 1.0, "swiglu_limit": 0.7, "num_experts_per_tok": 4}),
        ("gpt_oss", {"attention_bias": False}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"activation_function": "relu"}),
        ("lfm2", {"conv_bias": True}),
        ("lfm2", {"conv_L_cache": 4}),
        ("lfm2", {"full_attn_idxs": [0]}),  # the second of two stages has no attention
        ("qwen3_5_text", {"attention_bias": True}),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 2}),
        ("qwen3_5_text", {"full_attention_interval": 4}),
    ],
)
def test_options_of_a_config_are_followed(family: str, changes: dict[str, Any]):
    config = tiny_config(family, **changes)
    model, sequences = tiny_model(config), tokens(*LENGTHS)
    plain = tiny_model(tiny_config(family))
    theirs = reference(model, "lm", sequences)
    if (
        not {"attention_bias", "mlp_bias", "conv_bias", "conv_L_cache", "linear_conv_kernel_dim"}
        & changes.keys()
    ):
        assert (theirs - reference(plain, "lm", sequences)).abs().max() > 1e-3, "the option changes nothing"
    assert_close(run(pipeline(config, model, 2), sequences), theirs, 1e-5)


def test_values_of_16_bit_models_are_float32():
    """A value rounded to 8 bits could not tell returns of 10.0 and 10.03 apart."""
    config = tiny_config("llama")
    model, sequences = tiny_model(config, "scalar").bfloat16(), tokens(*LENGTHS)
    [stage] = pipeline(config, model, 1, "scalar", dtype=torch.bfloat16)
    values = run([stage], sequences)
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
    assert_close(values, reference(model, "scalar", sequences).float(), 0.05)
    weigh(values).backward()
    assert stage.score.weight.grad.dtype == torch.bfloat16


def test_the_padding_token_gets_no_gradient_as_in_transformers():
    config = tiny_config("llama", pad_token_id=2)
    model, sequences = tiny_model(config), [torch.tensor([5, 2, 7])]
    reference(model, "lm", sequences).sum().backward()
    [stage] = pipeline(config, model, 1)
    run([stage], sequences).sum().backward()
    gradient = stage.model.embed_tokens.weight.grad
    assert gradient[5].abs().max() > 0
    assert gradient[2].abs().max() == 0
    assert_close(gradient, model.model.embed_tokens.weight.grad, 1e-5)


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "gpt2", "lfm2", "qwen3_5_text"])
@pytest.mark.parametrize(
    "lengths",
    [(5, 9, 1), *(pytest.param(own, marks=pytest.mark.whole) for own in ((ROWS, ROWS), (ROWS, ROWS, 20)))],
)
def test_layers_compute_a_multiple_of_rows_on_the_cpu_and_what_pads_them_changes_nothing(
    family, lengths, monkeypatch
):
    """Gradients included; float64, so that another order of a sum does not show."""

    def passed(rows: int) -> tuple[Tensor, list[Tensor], set[int]]:
        monkeypatch.setattr("prefect_rlhf.rlhf_tasks.parallel.model.stage.ROWS", rows)
        config = tiny_config(family)  # the biases of Qwen2 make rows of zeros something else
        [stage] = pipeline(config, tiny_model(config).double(), 1, dtype=torch.float64)
        seen: set[int] = set()
        for layer in stage.model.layers.values():
            layer.register_forward_pre_hook(lambda _, args: seen.add(args[0].shape[1]))
        logits = run([stage], tokens(*lengths))
        logits.square().mean().backward()
        return logits.detach(), [p.grad for p in stage.parameters() if p.grad is not None], seen

    logits, gradients, rows = passed(ROWS)
    plain_logits, plain_gradients, plain_rows = passed(1)
    assert rows == {-(-sum(lengths) // ROWS) * ROWS}
    assert plain_rows == {sum(lengths)}
    torch.testing.assert_close(logits, plain_logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradients, plain_gradients, rtol=1e-9, atol=1e-12)


def samples_of_prompts() -> list[Tensor]:
    """Three samples of a prompt, one of another, two of a third. Windows of 4 and 13 begin in prompts and after."""
    (*prompts,) = tokens(11, 9, 14)
    answers = iter(tokens(3, 1, 9, 4, 12, 2, vocab=17))
    return [torch.cat([prompts[number], next(answers)]) for number in (0, 0, 0, 1, 2, 2)]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 13}),
        ("gemma2", {}),
        ("gemma2", {"sliding_window": 13}),
        ("gemma3_text", {"sliding_window": 13}),
        ("gemma4_text", {}),
        ("phi3", {"sliding_window": 4}),
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
        ("gpt2", {}),
        ("lfm2", {}),
        ("qwen3_5_text", {}),
    ],
)
@pytest.mark.parametrize(
    ("head", "recompute"),
    [
        *(("lm", recompute) for recompute in get_args(Recompute)),
        ("scalar", "none"),  # the heads lie after what is recomputed
        *(pytest.param("scalar", again, marks=pytest.mark.slow) for again in get_args(Recompute)[1:]),
    ],
)
def test_a_prompt_of_several_samples_is_computed_once_and_gives_the_same(
    family: str, changes: dict, head: Head, recompute: Recompute
):
    """Outputs and gradients equal those of whole sequences, over two stages, in float64."""
    config = tiny_config(family, **changes)
    model = tiny_model(config, head, torch.float64)
    micro = packed(samples_of_prompts())
    prompts = 2 * 11 + 14
    assert micro.computed_tokens == micro.tokens - prompts

    def passed(micro: MicroBatch) -> tuple[Tensor, list[Tensor], set[int]]:
        stages = pipeline(config, model, 2, head, dtype=torch.float64, recompute=recompute)
        rows = set[int]()
        for stage in stages:
            for layer in stage.model.layers.values():
                layer.register_forward_pre_hook(lambda _, args: rows.add(args[0].shape[1]))
        hidden = stages[0](micro.input_ids, micro)
        output = stages[1](hidden, micro)
        weigh(output, 0, config.vocab_size if head == "lm" else 1).backward()
        return output.detach(), [p.grad for stage in stages for p in stage.parameters()], rows

    output, gradients, rows = passed(micro)
    whole, expected, all_rows = passed(replace(micro, shared=None))
    assert rows == {-(-micro.computed_tokens // ROWS) * ROWS}
    assert all_rows == {-(-micro.tokens // ROWS) * ROWS}
    torch.testing.assert_close(output, whole, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "grouped"),
    [
        ("qwen3", False),
        ("gemma2", False),
        ("gemma4_text", False),
        ("phi3", False),
        ("mixtral", False),
        ("mixtral", True),
        ("gpt_oss", True),
        ("gpt2", False),
        ("lfm2", False),
        ("qwen3_5_text", False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_changes_no_bit(monkeypatch, family: str, grouped: bool, dtype: torch.dtype):
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.parallel.model.stage.can_group", lambda *_: grouped)
    config = tiny_config(family)
    model = tiny_model(config, dtype=dtype)
    outputs, gradients = [], []
    for recompute in get_args(Recompute):
        [stage] = pipeline(config, model, 1, dtype=dtype, recompute=recompute)
        with products(CPU, dtype):
            outputs.append(run([stage], tokens(*LENGTHS)))
            torch.autograd.backward(outputs[-1].sum())
        gradients.append([gradient_of(p) for p in stage.parameters()])
    for output, others in zip(outputs[1:], gradients[1:], strict=True):
        assert torch.equal(output, outputs[0])
        for plain, again in zip(gradients[0], others, strict=True):
            assert torch.equal(plain, again)


class Computed(TorchDispatchMode):
    """Counts the products, those of all experts together, attentions and norms that are computed inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.grouped = self.attentions = self.norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.products += "aten.mm." in name
        self.grouped += "grouped_mm" in name
        self.attentions += "attention" in name and "backward" not in name
        self.norms += "rsqrt" in name
        return func(*args, **(kwargs or {}))


def repeated(config, dtype: torch.dtype) -> list[Computed]:
    """What a backward pass computes with each kind of recomputation: none, selective and full."""
    model, counted = tiny_model(config, dtype=dtype), list[Computed]()
    for recompute in get_args(Recompute):
        output = run(pipeline(config, model, 1, dtype=dtype, recompute=recompute), tokens(*LENGTHS)).sum()
        with Computed() as computed:
            output.backward()
        counted.append(computed)
    return counted


def test_selective_recomputation_repeats_neither_products_nor_attention():
    config = tiny_config("llama")
    none, selective, full = repeated(config, torch.float64)  # whose products are torch's own everywhere
    layers = config.num_hidden_layers
    assert (none.attentions, none.norms) == (selective.attentions, 0) == (0, 0)
    assert selective.products == none.products
    assert selective.norms == full.norms == 2 * layers
    assert full.attentions == layers * len(LENGTHS)
    assert full.products == none.products + 6 * layers  # nothing needs the result of the last product


def test_nor_does_it_repeat_those_of_all_experts_together(monkeypatch):
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.parallel.model.stage.can_group", lambda *_: True)
    config = tiny_config("mixtral")
    none, selective, full = (computed.grouped for computed in repeated(config, torch.float32))
    # of three products the gradients of both factors; nothing needs the result of the last product
    assert (none, selective, full) == tuple(config.num_hidden_layers * n for n in (6, 6, 8))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float64, 1e-6)])
def test_other_dtypes(dtype: torch.dtype, tolerance: float):
    config = tiny_config("gemma")
    model, sequences = tiny_model(config, dtype=dtype), tokens(*LENGTHS)
    ours = run(pipeline(config, model, 2, dtype=dtype), sequences)
    assert ours.dtype == dtype
    assert_close(ours.double(), reference(model, "lm", sequences).double(), tolerance)


def test_float64_is_not_rounded_to_float32_on_the_way():
    config = tiny_config("llama")
    model = tiny_model(config, dtype=torch.float64)
    [stage] = pipeline(config, model, 1, dtype=torch.float64)
    before = run([stage], tokens(8))
    stage.model.embed_tokens.weight.data *= 1 + 1e-12
    moved = (run([stage], tokens(8)) - before).abs().max()
    assert 0 < moved < 1e-9


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("smollm3", {"base_model_tp_plan": {"layers.*.mlp": "packed_colwise"}}, "packed_colwise"),
        ("smollm3", {"base_model_tp_plan": None}, "declares no base_model_tp_plan"),
    ],
)
def test_a_model_that_nothing_says_how_to_split_is_refused(
    family: str, changes: dict[str, Any], message: str
):
    config = AutoConfig.for_model(family)
    check_model(config)
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(ValueError, match=message):
        check_model(config)


def test_a_linear_module_of_an_untested_family_without_a_plan_is_refused():
    config = AutoConfig.for_model("smollm3", **SIZES)
    shape = replace(shape_of(tiny_config("llama")), family="smollm3")
    layout, at = Layout(shape, "lm", Placement((0,), ParallelStrategy())), Coordinate(0, 0, 0)
    how: dict[str, Any] = {"device": CPU, "dtype": torch.float32}
    Stage(config, layout, at, None, **how)
    plan = config.base_model_tp_plan
    config.base_model_tp_plan = {key: style for key, style in plan.items() if "up_proj" not in key}
    with pytest.raises(ValueError, match=r"does not say how to split model.layers.0.mlp.up_proj"):
        Stage(config, layout, at, None, **how)


# Several ranks: each compares its output with its slice, and hands back its gradients


def _train(rank: int, world: int, family: str, changes: dict, strategy, head: Head) -> dict:
    config = tiny_config(family, **changes)
    model, sequences = tiny_model(config, head), tokens(*LENGTHS)
    theirs = reference(model, head, sequences)
    placement = Placement(tuple(range(world)), strategy)
    groups = ProcessGroups(device_sets(placement), 240.0, CPU)
    tp_group = groups[placement.tp_group(rank)]
    micro, at = packed(sequences), placement.coordinate(rank)
    stage = build(
        config, model, placement, rank, head, tp_group=tp_group, recompute=("selective", "full")[at.pp]
    )
    x = micro.input_ids
    if not stage.is_first:
        x = torch.empty(micro.tokens, stage.widths[0])
        dist.recv(x, placement.device(0, at.tp, at.pp - 1))
        x.requires_grad_()
    output = stage(x, micro)
    if stage.is_last:
        start, columns = 0, 1
        if head == "lm":
            vocab, columns = stage.layout.units("vocab", at.tp), theirs.shape[1]
            start, theirs = vocab.start, theirs[:, vocab.start : vocab.stop]
        assert_close(output, theirs, 1e-5)
        weigh(output, start, columns).backward()
    else:
        dist.send(output.detach(), placement.device(0, at.tp, at.pp + 1))
        gradient = torch.empty_like(output)
        dist.recv(gradient, placement.device(0, at.tp, at.pp + 1))
        output.backward(gradient)
    if not stage.is_first:
        dist.send(x.grad, placement.device(0, at.tp, at.pp - 1))
    return {name: gradient_of(parameter) for name, parameter in stage.named_slices().items()}


UNEVEN = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", UNEVEN),
    ("mistral", {"sliding_window": 3}),
    ("gemma", {"num_key_value_heads": 1, "pad_token_id": 0}),
    ("gemma2", {"pad_token_id": 0}),
    ("phi3", {**UNEVEN, "sliding_window": 3}),
    ("olmo2", UNEVEN),
    ("olmo2", {"num_key_value_heads": 1}),
    ("olmo3", {"num_key_value_heads": 4}),
    ("glm", {**UNEVEN, "attention_bias": False}),
    ("glm4", {}),
    ("gemma3_text", {**UNEVEN, "tie_word_embeddings": False}),
    ("gemma4_text", {}),
    *(("gemma4_text", {**UNEVEN, **own}) for own in GEMMA4.values()),
    ("mixtral", {"sliding_window": 3}),
    ("qwen3_moe", {**UNEVEN, "norm_topk_prob": True, "tie_word_embeddings": True}),
    ("gpt_oss", {**UNEVEN, "sliding_window": 3}),
    ("granite", {**UNEVEN, "attention_bias": True}),
    ("starcoder2", {**UNEVEN, "sliding_window": 3, "head_dim": None}),
    ("cohere", {**UNEVEN, "pad_token_id": 0}),
    ("cohere2", {**UNEVEN, "tie_word_embeddings": False}),
    ("gpt2", {"hidden_size": 36, "num_attention_heads": 9, "pad_token_id": 0}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"mlp_only_layers": [2]}),
    ("glm4_moe", {**UNEVEN, "head_dim": 8}),
    ("lfm2", {**UNEVEN, "hidden_size": 45, "conv_bias": True}),
    ("qwen3_next", {}),
    ("qwen3_5_text", {**UNEVEN, "linear_num_key_heads": 3, "linear_num_value_heads": 6}),
    ("qwen3_5_moe_text", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
    ("lfm2_moe", {**UNEVEN, "hidden_size": 45}),
    ("deepseek_v3", {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 9}),
    ("glm4_moe_lite", {}),
]


BOTH = ParallelStrategy(tp=2, pp=2)
SPLITS: list[tuple[ParallelStrategy, Head, tuple[str, ...]]] = [
    (ParallelStrategy(tp=2), "lm", ()),
    (ParallelStrategy(pp=2), "lm", ()),
    (BOTH, "lm", ()),
    (ParallelStrategy(tp=2), "scalar", ("gemma2",)),
    (ParallelStrategy(pp=2), "scalar", ("phi3",)),
    (BOTH, "scalar", ("mixtral",)),
]
"""How other families are split, and of which continuous integration runs that: of each the split of both kinds, which
has all that either has; a value head differs after the last layer, which families do not. The default suite runs
those of Gemma 2, Gemma 4, OLMo 2, Mixtral, GPT-OSS, GPT-2, LFM2 and Qwen3.5."""
BY_DEFAULT = ("gemma2", "gemma4_text", "olmo2", "mixtral", "gpt_oss", "gpt2", "lfm2", "qwen3_5_text")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("family", "changes", "strategy", "head"),
    [
        ("llama", {}, ParallelStrategy(tp=2), "lm"),
        ("llama", {}, ParallelStrategy(tp=4), "lm"),
        ("llama", UNEVEN, ParallelStrategy(tp=2), "lm"),
        ("llama", {**UNEVEN, "attention_bias": True, "mlp_bias": True}, ParallelStrategy(tp=4), "lm"),
        ("llama", {"tie_word_embeddings": True}, ParallelStrategy(tp=2, pp=2), "lm"),
        ("llama", {}, ParallelStrategy(tp=2, pp=2), "scalar"),
        ("qwen3", {**UNEVEN, "tie_word_embeddings": True}, ParallelStrategy(tp=2, pp=2), "lm"),
        ("qwen3", {}, ParallelStrategy(tp=4), "lm"),
        ("mixtral", {}, ParallelStrategy(tp=4), "lm"),
        ("qwen3_moe", {}, ParallelStrategy(tp=4), "lm"),
        ("qwen3", UNEVEN, ParallelStrategy(tp=2, pp=2), "scalar"),
        *[
            pytest.param(
                family,
                changes,
                strategy,
                head,
                marks=pytest.mark.slow
                if (strategy, head) != (BOTH, "lm") and family not in kept
                else ()
                if family in BY_DEFAULT
                else pytest.mark.whole,
            )
            for family, changes in OTHERS
            for strategy, head, kept in SPLITS
        ],
    ],
)
def test_split_models_equal_transformers(
    ranks, family: str, changes: dict, strategy: ParallelStrategy, head: Head
):
    gradients = ranks.run(strategy.size, _train, family, changes, strategy, head)
    config = tiny_config(family, **changes)
    model = tiny_model(config, head)
    theirs = reference(model, head, tokens(*LENGTHS))
    weigh(theirs, 0, theirs.shape[1] if head == "lm" else 1).backward()
    layout = Layout(shape_of(config), head, Placement(tuple(range(strategy.size)), strategy))
    theirs_by_name = gradients_of(model, layout)
    for spec in layout.parameters:
        whole, of = theirs_by_name[spec.name], of_tensor(layout, theirs_by_name, spec.name)
        total = torch.zeros_like(whole)
        for device, rows in layout.holders(spec.name, 0):
            mine = gradients[device][spec.name]
            part = total.narrow(spec.dim, rows.start, rows.size)
            if spec.partial_gradient:
                part += mine
            else:
                expected = whole.narrow(spec.dim, rows.start, rows.size)
                assert_close(mine, expected, GRADIENT, f"{spec.name} on {device}", of)
                part.copy_(mine)
        assert_close(total, whole, GRADIENT, spec.name, of)
