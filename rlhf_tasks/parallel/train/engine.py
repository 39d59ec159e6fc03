"""The engine: one rank's part of one role's model on one placement.

All ranks of the placement call its methods together, each with the batch of its own replica. Replicas may have
different numbers of micro-batches. A replica without samples still takes part in all collectives.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch, predicting, split
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, all_gather, all_reduce, group_size
from prefect_rlhf.rlhf_tasks.parallel.comm.host_memory import Copier
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import LENGTHS
from prefect_rlhf.rlhf_tasks.parallel.layout.work import pass_flops
from prefect_rlhf.rlhf_tasks.parallel.model.logprobs import (
    Vocabulary,
    packed_logprobs,
    packed_logprobs_and_entropy,
)
from prefect_rlhf.rlhf_tasks.parallel.model.products import products
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import MasterWeights, Optimizer, OptimizerSettings
from prefect_rlhf.rlhf_tasks.parallel.train.pipeline import Pipeline
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach
from prefect_rlhf.rlhf_tasks.system.interruption import leave_if_ended


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of one micro-batch, before the division by the global denominator.

    total    scalar with a gradient: the sum of weighted terms
    metrics  name -> scalar; each is summed over micro-batches and dp ranks. The train step was told these names
    """

    total: Tensor
    metrics: Mapping[str, Tensor]


Output = Callable[[Tensor, MicroBatch], Tensor]
"""(output of the last stage, its micro-batch) -> rows: one per token [T, ...] or one per sample [n, ...]."""

Loss = Callable[[Tensor, MicroBatch], LossTerms]
"""(output of the last stage, its micro-batch) -> terms, equal on all tp and cp ranks."""


class Engine:
    """A model, and the state of its weights where they change on this placement.

    stage               this rank's part of the model, weights loaded
    layout              the stage's `trained`: of the whole model, or under LoRA of its trained part
    optimizer_settings  None for frozen and blended roles and read-only copies
    blended             the weights are blended with others: they have master weights, and no optimizer
    master              the state that commits hold: an `Optimizer` where the role trains, None where nothing changes
    copies              where the optimizer's state is kept in host memory, what copies it; None: it is on the device
    micro_batch_tokens  most tokens of a micro-batch (`split`); None: only the calls' numbers of micro-batches count
    tokens              only tokens below are drawn: those of the tokenizer, where the vocabulary is padded; None: all
    counts_drawn        whether log-probabilities are over these only, as those of responses are that were drawn here;
                        else over the whole vocabulary
    version             the number of train calls applied to these weights. The caller increments it, because one
                        train call may be many calls of `train_step`
    state               JSON-able state of the role besides parameters and optimizer
    flops               FLOPs that this replica has computed (layout/work.py); counted on its head, 0 elsewhere
    watch               is given each report of `train_step` before the step returns; it may raise
    """

    def __init__(
        self,
        stage: Stage,
        layout: Layout,
        groups: ProcessGroups,
        optimizer_settings: OptimizerSettings | None = None,
        version: int = 0,
        blended: bool = False,
        micro_batch_tokens: int | None = None,
        copies: Copier | None = None,
        tokens: int | None = None,
        counts_drawn: bool = True,
    ) -> None:
        self.stage = stage
        self.micro_batch_tokens = micro_batch_tokens
        self.layout = layout
        self.placement = layout.placement
        self.groups = groups
        self.device = groups.device
        self.coordinate = self.placement.coordinate(groups.rank)
        self.version = version
        self.state: dict[str, Any] = {}
        self.flops = 0.0
        self.watch: Callable[[Mapping[str, float]], None] = lambda report: None
        self._mesh = groups[self.placement.devices]
        stage.requires_grad_(False)
        self.master: MasterWeights | None = None
        if blended:
            self.master = MasterWeights(stage.trained_slices(), layout, groups, shares=stage.shares)
        if optimizer_settings is not None:
            trained = stage.trained_slices()
            for parameter in trained.values():
                parameter.requires_grad_()
            self.master = Optimizer(trained, layout, groups, optimizer_settings, copies, stage.shares)
        self.pipeline = Pipeline(self.placement, groups, stage.widths, stage.dtype, stage.passed_on)
        tp_devices = self.placement.tp_group(groups.rank)
        sizes = tuple(layout.units("vocab", tp_rank).size for tp_rank in range(len(tp_devices)))
        places = tuple(sorted(tp_devices).index(device) for device in tp_devices)
        self.drawn = Vocabulary(sizes, self.coordinate.tp, groups[tp_devices], places, tokens)
        self._counted = self.drawn if counts_drawn else replace(self.drawn, tokens=None)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside, the device has all of its slices, also of sharded weights. Collective over the dp group."""
        with nullcontext() if self.stage.shares is None else self.stage.shares.whole():
            yield

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None where the role does not train on this placement."""
        return self.master if isinstance(self.master, Optimizer) else None

    @property
    def is_head(self) -> bool:
        """Whether this rank holds its replica's samples: cp and tp rank 0 of the last stage."""
        return self.is_last_stage and self.coordinate.tp == self.coordinate.cp == 0

    @property
    def dtype_of_rows(self) -> torch.dtype:
        """The type of numbers per token or sample: float64 if the model is float64, else float32."""
        return torch.promote_types(self.stage.dtype, torch.float32)

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.is_last

    def inference(
        self, batch: SampleBatch, output: Output, micro_batches: int, counted: str | None = None
    ) -> Packed | None:
        """A forward pass without gradients, followed by `output` on the last stage.

        batch          this replica's samples, with `input_ids`, and LENGTHS where they are several sequences; the
                       same on all its ranks
        micro_batches  most micro-batches into which the batch is cut; more where `micro_batch_tokens` asks for them
        counted        see `train_step`
        Returns the rows of `output` in the batch's order on all ranks of the last stage, None on the others. A sample
        has the rows of all its sequences.
        """
        sequences = batch.sequences()
        micros = split(sequences, micro_batches, self.micro_batch_tokens)

        def run(x: Tensor, micro: MicroBatch) -> Tensor:
            y, micro = self._stage_output(x, micro, counted)
            return output(y, micro) if self.is_last_stage else y

        shares = self.stage.shares
        passes = len(micros) if shares is None else shares.most_passes(len(micros))
        with products(self.device, self.stage.dtype):
            rows = self.pipeline.forward(micros, run)
        if shares is not None:
            for _ in range(passes - len(micros)):
                shares.pass_by()
            shares.leave()
        self.count(self._flops_of(sequences, micros, counted))
        if not self.is_last_stage:
            return None
        if not micros:
            return Packed(torch.zeros(0, dtype=self.dtype_of_rows, device=self.device), ())
        in_order = _in_order(sequences, micros, rows)
        return in_order.joined(batch[LENGTHS].lengths) if LENGTHS in batch.data else in_order

    def train_step(
        self,
        batch: SampleBatch,
        loss: Loss,
        denominator: float,
        micro_batches: int,
        learning_rate: float,
        metrics: Sequence[str] = (),
        counted: str | None = None,
    ) -> dict[str, float]:
        """One optimizer step on the gradient of sum(totals) / denominator over all replicas' samples.

        denominator    e.g. tokens of the global mini-batch, so that the loss is a mean; equal on all ranks
        micro_batches  most micro-batches for gradient accumulation
        metrics        names of the loss's metrics, equal on all ranks: most ranks never compute the loss
        counted        key of a bool mask with a row per token: only the tokens where it is True count. A language
                       model's head computes only the rows that predict them, and `logprobs` are 0 elsewhere;
                       None: all count. A scalar head computes every row
        Returns, equal on every rank of the placement: the sums of the loss's metrics, and
            loss       sum(totals) / denominator
            grad_norm  the global gradient norm before clipping
            skipped    1.0 when loss or norm was not finite, so that no rank changed its weights; else 0.0
        Raises ValueError where the loss gives other metrics than these.
        """
        optimizer = self.optimizer
        assert optimizer is not None, "this engine holds a frozen model or a copy: it cannot be trained"
        names = (*metrics, "loss")
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)

        def run(x: Tensor, micro: MicroBatch) -> Tensor:
            y, micro = self._stage_output(x, micro, counted)
            if not self.is_last_stage:
                return y
            terms = loss(y, micro)
            if terms.metrics.keys() != set(metrics):
                raise ValueError(
                    f"the loss gives the metrics {sorted(terms.metrics)}, but the train step was told "
                    f"{sorted(metrics)}: name all of them there, and no others"
                )
            values = {**terms.metrics, "loss": terms.total}
            sums.add_(torch.stack([values[name].detach().double() for name in names]))
            return terms.total / denominator

        sequences = batch.sequences()
        with products(self.device, self.stage.dtype):
            micros = split(sequences, micro_batches, self.micro_batch_tokens)
            optimizer.gradients.begin(len(micros))
            self.pipeline.forward_backward(micros, run, optimizer.gradients.end_pass)
            optimizer.gradients.end_passes()
        reach(Point.BACKWARD)
        self.count(self._flops_of(sequences, micros, counted, training=True))
        totals = dict(zip(names, self._sum_in_order(sums).tolist(), strict=True))
        totals["loss"] /= denominator
        applied = optimizer.apply(learning_rate, finite=math.isfinite(totals["loss"]))
        report = {**totals, "grad_norm": applied.grad_norm, "skipped": float(applied.skipped)}
        self.watch(report)
        return report

    def _stage_output(self, x: Tensor, micro: MicroBatch, counted: str | None) -> tuple[Tensor, MicroBatch]:
        """The stage's output, and the micro-batch with the rows that passed the head."""
        leave_if_ended()
        counts = counted is not None or self.stage.context is not None
        if counts and self.is_last_stage and self.layout.head == "lm":
            micro = predicting(micro, counted)
        return self.stage(x, micro, rows=micro.rows), micro

    def _flops_of(
        self, batch: SampleBatch, micros: Sequence[MicroBatch], counted: str | None, training: bool = False
    ) -> float:
        """FLOPs of a pass (layout/work.py) over this replica's samples, cut into micro-batches."""
        layout, lengths = self.layout, batch["input_ids"].lengths
        predicted = None
        if counted is not None and layout.head == "lm" and self.is_head:
            mask = batch[counted].values
            firsts = mask[[0, *accumulate(lengths)][:-1]]
            predicted = int(mask.sum() - firsts.sum())  # nothing predicts a sample's first token
        shared = [begin for micro in micros if micro.shared for begin in micro.shared.begins if begin]
        return pass_flops(layout.shape, layout.head, lengths, predicted, layout.lora, shared, training)

    def count(self, flops: float) -> None:
        """Add FLOPs that this replica has computed; ignored except on its head."""
        if self.is_head:
            self.flops += flops

    def logprobs(self, logits: Tensor, micro: MicroBatch, temperature: float = 1.0) -> Tensor:
        """Log-probability of each token given the tokens before it: [T]; 0 at each sample's first token, and where a
        token does not count.

        logits  [T or R, vocabulary / tp], the output of the last stage; with cp > 1, of this rank's rows
        Collective over the tp and cp ranks of the stage.
        """
        return packed_logprobs(logits, micro, self._counted, temperature, self.stage.context)

    def logprobs_and_entropy(
        self, logits: Tensor, micro: MicroBatch, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """`logprobs` [T], and the entropy [T] in nats of the distribution that each token was drawn from.

        logits  [T or R, vocabulary / tp]
        """
        return packed_logprobs_and_entropy(logits, micro, self._counted, temperature, self.stage.context)

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Sum over the replicas: float64 of the shape of `values`, equal on every rank of the placement.

        values  any shape, the same on all ranks; only the values of the heads count, others may pass zeros
        """
        mine = (
            values.to(torch.float64, copy=True)
            if self.is_head
            else torch.zeros_like(values, dtype=torch.float64)
        )
        return all_reduce(mine, self._mesh)

    def _sum_in_order(self, mine: Tensor) -> Tensor:
        """Sum the heads' numbers, one head after the other: no bit depends on how a backend reduces."""
        if self._mesh is None:
            return mine
        mine = mine if self.is_head else torch.zeros_like(mine)
        parts = mine.new_empty(group_size(self._mesh), len(mine))
        all_gather(parts.view(-1), mine, group=self._mesh)
        total = torch.zeros_like(mine)
        for part in parts:
            total += part
        return total


def _in_order(batch: SampleBatch, micros: list[MicroBatch], rows: list[Tensor]) -> Packed:
    """The rows of all micro-batches in the order of the batch."""
    by_id: dict[int, deque[Tensor]] = defaultdict(deque)  # several where sequences share a sample's id
    for micro, part in zip(micros, rows, strict=True):
        if part.shape[0] == micro.tokens:
            pieces = micro.per_sample(part)
        else:
            assert part.shape[0] == len(micro.ids), f"{part.shape[0]} rows for {len(micro.ids)} samples"
            pieces = part.split(1)
        for sample, piece in zip(micro.ids, pieces, strict=True):
            by_id[sample].append(piece)
    return Packed.of([by_id[sample].popleft() for sample in batch.ids])
