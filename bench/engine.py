"""An engine with the weights of a transformers model, for benches and checks of it alone."""

import torch
from transformers import PreTrainedModel

from rlhf_tasks.parallel.comm.groups import ProcessGroups
from rlhf_tasks.parallel.comm.host_memory import Copier
from rlhf_tasks.parallel.layout.shape import Lora, ModelShape, linear_modules
from rlhf_tasks.parallel.layout.slices import Layout
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.model.stage import Stage
from rlhf_tasks.parallel.model.weights import initialise_adapters
from rlhf_tasks.parallel.train.engine import Engine
from rlhf_tasks.parallel.train.optimizer import OptimizerSettings

LEARNING_RATE, BETAS, MAX_GRAD_NORM = 1e-4, (0.9, 0.95), 1.0
CPU = torch.device("cpu")


def build_engine(
    whole: PreTrainedModel,
    strategy: ParallelStrategy,
    groups: ProcessGroups,
    dtype: torch.dtype,
    rank: int | None = None,
    copies: Copier | None = None,
) -> Engine:
    """A trainable engine with its slices of the whole model's weights.

    rank    of adapters; None: all weights train
    copies  copies the optimizer's state from and to host memory, where it is kept; None: it is on the device
    """
    config = whole.config
    placement = Placement(tuple(range(strategy.size)), strategy)
    shape = ModelShape.from_config(config.to_dict())
    lora = None if rank is None else Lora(rank, 2.0 * rank, tuple(linear_modules(shape)))
    layout = Layout(shape, "lm", placement, lora)
    coordinate, tp_group = placement.coordinate(groups.rank), groups[placement.tp_group(groups.rank)]
    stage = Stage(config, layout, coordinate, tp_group, device=groups.device, dtype=dtype)
    parameters = dict(whole.named_parameters())
    for name, mine in stage.named_slices().items():
        rows = layout.whole.held(groups.rank)[name]
        dim = layout.whole.specs[name].dim
        mine.data.copy_(parameters[name].detach().narrow(dim, rows.start, rows.size))
    initialise_adapters(stage, seed=0)
    settings = OptimizerSettings(BETAS, eps=1e-8, weight_decay=0.0, max_grad_norm=MAX_GRAD_NORM)
    return Engine(stage, layout, groups, settings, copies=copies)
