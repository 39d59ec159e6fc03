"""Roles whose state follows from parameters' names, in any layout: what saving and moving state is tested with."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import StateLayout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.model.shares import Shares
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import Optimizer, OptimizerSettings, StateShard

ADAPTERS = Lora(2, 4.0, ("q_proj", "v_proj", "o_proj", "down_proj"))
KINDS = ("master", "exp_avg", "exp_avg_sq")


def model(**changes) -> ModelShape:
    """9 query heads on 3 KV heads, 11 columns, 17 tokens: nothing divides evenly by 2 or 4."""
    sizes = {"family": "qwen3", "query_heads": 9, "kv_heads": 3, "layers": 3, **changes}
    return ModelShape(
        hidden=8, head_dim=2, intermediate=11, vocab=17, context=64, qk_norm="each head", **sizes
    )


def place(devices, dp=1, tp=1, pp=1, cp=1, shard="gradients") -> Placement:
    return Placement(tuple(devices), ParallelStrategy(dp, tp, pp, cp, shard))


@dataclass
class Role:
    """All of an engine that a checkpoint sees."""

    layout: Layout
    groups: ProcessGroups
    master: Optimizer
    slices: Mapping[str, torch.Tensor]
    shares: Shares | None = None
    version: int = 0
    state: dict[str, Any] = field(default_factory=dict)


def whole_state(layout: Layout, dtype) -> dict[tuple[str, str], torch.Tensor]:
    """(kind, name) -> the whole parameter's state: numbers that follow from the name alone."""
    whole = {}
    for spec in layout.parameters:
        for kind in KINDS:
            seed = int(hashlib.sha256(f"{kind} {spec.name}".encode()).hexdigest()[:8], 16)
            generator = torch.Generator().manual_seed(seed)
            whole[kind, spec.name] = torch.randn(spec.shape, generator=generator, dtype=dtype)
    return whole


def local(whole: torch.Tensor, layout: Layout, name: str, rank: int) -> torch.Tensor:
    rows = layout.held(rank)[name]
    return whole.narrow(layout.specs[name].dim, rows.start, rows.size).contiguous()


def build(layout: Layout, groups: ProcessGroups, dtype) -> Role:
    """A role with all weights and moments zero."""
    slices = {
        name: torch.nn.Parameter(torch.zeros(layout.slice_shape(name, groups.rank), dtype=dtype))
        for name in layout.held(groups.rank)
    }
    settings = OptimizerSettings((0.9, 0.95), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
    is_sharded = layout.placement.strategy.shard == "parameters" and layout.lora is None
    shares = Shares(layout, groups, dtype) if is_sharded else None
    return Role(layout, groups, Optimizer(slices, layout, groups, settings, shares=shares), slices, shares)


def expected(shard: StateShard, whole, layout: Layout, rank: int) -> torch.Tensor:
    return local(whole[shard.kind, shard.name], layout, shard.name, rank).flatten()[shard.start : shard.stop]


def precise(dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def fill(role: Role, whole) -> None:
    """Give a role the state of `whole_state`."""
    for shard in role.master.shard_state():
        shard.tensor.copy_(expected(shard, whole, role.layout, role.groups.rank))


def mismatches(role: Role, whole, rank: int) -> list[str]:
    """Which state and weights of a role are not bit by bit those of `whole_state`."""
    layout, wrong = role.layout, []
    for shard in role.master.shard_state():
        if not torch.equal(shard.tensor, expected(shard, whole, layout, rank)):
            wrong.append(f"{layout.placement}: {shard.kind} of {shard.name}")
    for name, weight in role.slices.items() if role.shares is None else role.shares.ranges().items():
        mine = local(whole["master", name], layout, name, rank).to(weight.dtype)
        if role.shares is not None:
            mine = mine.flatten()[slice(*StateLayout(layout).range(name, rank))]
        if not torch.equal(weight, mine):
            wrong.append(f"{layout.placement}: weights of {name}")
    return wrong


FOUR = [
    place(range(4), dp=2, tp=2),
    place(range(4), dp=4),
    place([2, 0, 3, 1], tp=2, pp=2),
    place([3, 1], dp=2),
    place(range(4), tp=4),
    place([1]),
    place([0, 1, 2], pp=3),
    place([2, 0, 3, 1], tp=2, cp=2),
    place([3, 0], dp=2, shard="parameters"),
    place(range(4), dp=2, cp=2, shard="parameters"),
]
