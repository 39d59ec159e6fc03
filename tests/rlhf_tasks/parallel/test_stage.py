"""Stages against plain transformers: logits, values and gradients, whole and split over tp and pp."""

import pytest
import torch
from torch import Tensor, nn

from rlhf_tasks.parallel.layout import Head, Layout
from rlhf_tasks.parallel.stage import Stage
from rlhf_tasks.parallel.topology import ParallelStrategy, Placement
from tests.tiny_models import CONFIGS, packed, shape_of, tiny_config, tiny_model, tokens

CPU = torch.device("cpu")
LENGTHS = (5, 9, 1, 7)


def build(config, model: nn.Module, strategy: ParallelStrategy, device: int, head: Head = "lm", **kwargs):
    """The stage of one device, with its slices of a whole model."""
    placement = Placement(tuple(range(strategy.size)), strategy)
    layout = Layout(shape_of(config), head, placement)
    groups = kwargs.pop("groups", None)
    stage = Stage(
        config,
        layout,
        placement.coordinate(device),
        groups[placement.tp_group(device)] if groups else None,
        device=CPU,
        dtype=kwargs.pop("dtype", torch.float32),
        **kwargs,
    )
    fill(stage, dict(model.named_parameters()), device)
    return stage


def fill(stage: Stage, whole: dict[str, Tensor], device: int) -> None:
    for name, mine in stage.named_slices().items():
        mine.data.copy_(cut(stage, whole[name], name, device))


def cut(stage: Stage, whole: Tensor, name: str, device: int) -> Tensor:
    rows = stage.layout.held(device)[name]
    return whole.detach().narrow(stage.layout.specs[name].dim, rows.start, rows.size)


def reference(model: nn.Module, head: Head, sequences: list[Tensor]) -> Tensor:
    """What transformers gives for each sequence alone, concatenated."""
    if head == "lm":
        return torch.cat([model(s[None]).logits[0] for s in sequences])
    return torch.cat([model.score(model.model(s[None]).last_hidden_state)[0, :, 0] for s in sequences])


def weigh(output: Tensor, start: int = 0, columns: int = 1) -> Tensor:
    """A scalar in which every output element has its own weight; `start` and `columns` place a slice."""
    if output.ndim == 1:
        return (output * torch.cos(torch.arange(len(output)))).sum()
    row, column = torch.arange(len(output)), torch.arange(start, start + output.shape[1])
    return (output.float() * torch.cos((row[:, None] * columns + column).float())).sum()


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float, what: str = "") -> None:
    """Largest difference relative to the largest element."""
    ours, theirs = ours.detach(), theirs.detach()
    difference = float((ours - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-30)
    assert difference < tolerance, f"{what}: relative difference {difference:.2e}"


# One process, stages composed by hand


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_two_stages_equal_transformers(family: str, tied: bool):
    config = tiny_config(family, tie_word_embeddings=tied)
    model, sequences = tiny_model(config), tokens(*LENGTHS)
    micro = packed(sequences)
    theirs = reference(model, "lm", sequences)
    weigh(theirs, 0, theirs.shape[1]).backward()
    stages = [build(config, model, ParallelStrategy(pp=2), device) for device in range(2)]
    ours = stages[1](stages[0](micro.input_ids, micro), micro)
    assert_close(ours, theirs, 1e-5)
    weigh(ours, 0, ours.shape[1]).backward()
    for name, parameter in model.named_parameters():
        holders = [s.get_parameter(name).grad for s in stages if name in s.named_slices()]
        assert len(holders) == (2 if tied and "embed_tokens" in name else 1)
        assert_close(sum(holders), parameter.grad, 1e-5, name)
