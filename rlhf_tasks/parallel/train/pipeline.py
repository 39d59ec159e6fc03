"""Runs micro-batches through the stages of one replica: forward only, or forward and backward as 1F1B.

Every rank of a replica holds the same micro-batches, so each knows the shape of what its neighbours send:
hidden states (or their gradient) [rows that are passed on, columns]. Sends and receives between
neighbours are posted in pairs, so the schedules cannot deadlock where a send waits for its receive (NCCL, gloo).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import deterministic

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement

StageRun = Callable[[Tensor, MicroBatch], Tensor]
"""A stage's computation: (input, micro-batch) -> output.

The input is token ids [T] on the first stage, else hidden states [C, columns] of the C rows that are passed on. The
output is hidden states [C, columns]; on the last stage any tensor (forward only) or the scalar to differentiate."""


class Pipeline:
    """This rank's place in the pipeline of its replica; with one stage nothing is sent.

    widths  columns of what comes from the stage before, and of what goes to the next: of hidden states, and of what
            goes with them
    dtype   of hidden states and their gradients
    rows    how many hidden states are passed on for a micro-batch
    """

    def __init__(
        self,
        placement: Placement,
        groups: ProcessGroups,
        widths: tuple[int, int],
        dtype: torch.dtype,
        rows: Callable[[MicroBatch], int],
    ) -> None:
        stages = placement.pp_group(groups.rank)
        here = stages.index(groups.rank)
        self._previous = stages[here - 1] if here > 0 else None
        self._next = stages[here + 1] if here + 1 < len(stages) else None
        self._later_stages = len(stages) - 1 - here
        self._group = groups[stages]
        self._device = groups.device
        self._widths = widths
        self._rows = rows
        self._dtype = dtype

    @property
    def is_last(self) -> bool:
        return self._next is None

    @torch.no_grad()
    def forward(self, micros: Sequence[MicroBatch], run: StageRun) -> list[Tensor]:
        """The results of `run`, one tensor per micro-batch, on the last stage; an empty list on the others.

        A stage computes the next micro-batch while the hidden states of the previous one are being sent.
        """
        results, sending = [], deque()
        for micro in micros:
            x = self._exchange(self._previous, receive=self._rows(micro))
            y = run(micro.input_ids if x is None else x, micro)
            if self._next is None:
                results.append(y)
            else:
                sending.append((y, self._start(self._next, send=y)))  # y must live until it is sent
        for _, works in sending:
            _wait(works)
        return results

    def forward_backward(
        self, micros: Sequence[MicroBatch], run: StageRun, end_pass: Callable[[], None] = lambda: None
    ) -> None:
        """Accumulate the gradients of the sum of the last stage's scalars in the parameters' `grad`.

        end_pass  called after each backward pass, before its gradient is sent to the previous stage

        The schedule is 1F1B (one forward, one backward; arXiv:2104.04473). A stage starts with as many forward passes
        as there are later stages and then alternates forward and backward passes, so that it holds the activations of
        at most pp micro-batches.
        """
        warm_up = min(self._later_stages, len(micros))
        steady = len(micros) - warm_up
        alive: deque[tuple[Tensor | None, Tensor]] = deque()

        def forward(micro: MicroBatch, x: Tensor | None) -> Tensor:
            y = run(micro.input_ids if x is None else x.requires_grad_(), micro)
            alive.append((x, y))
            return y.detach()

        def backward(gradient: Tensor | None) -> Tensor | None:
            x, y = alive.popleft()
            with sums_in_order(self._device):
                torch.autograd.backward(y, gradient)
            end_pass()
            return None if x is None else x.grad

        for micro in micros[:warm_up]:
            y = forward(micro, self._exchange(self._previous, receive=self._rows(micro)))
            self._exchange(self._next, send=y)
        x = self._exchange(self._previous, receive=self._rows(micros[warm_up])) if steady else None
        for number, micro in enumerate(micros[warm_up:]):
            y = forward(micro, x)
            gradient = backward(self._exchange(self._next, send=y, receive=self._rows(micros[number])))
            following = self._rows(micros[warm_up + number + 1]) if number + 1 < steady else None
            x = self._exchange(self._previous, send=gradient, receive=following)
        for micro in micros[steady:]:
            gradient = backward(self._exchange(self._next, receive=self._rows(micro)))
            self._exchange(self._previous, send=gradient)

    def _exchange(
        self, peer: int | None, send: Tensor | None = None, receive: int | None = None
    ) -> Tensor | None:
        """Send to and receive [receive, columns] from a neighbour at the same time; None without a neighbour."""
        if peer is None:
            return None
        received = None
        if receive is not None:
            width = self._widths[0 if peer == self._previous else 1]
            received = torch.empty(receive, width, dtype=self._dtype, device=self._device)
        _wait(self._start(peer, send, received))
        return received

    def _start(self, peer: int, send: Tensor | None = None, receive: Tensor | None = None) -> list[dist.Work]:
        operations = []
        if send is not None:
            assert send.dtype == self._dtype, f"a stage gave {send.dtype}, the pipeline carries {self._dtype}"
            operations.append(dist.P2POp(dist.isend, send.contiguous(), peer, self._group))
        if receive is not None:
            operations.append(dist.P2POp(dist.irecv, receive, peer, self._group))
        return dist.batch_isend_irecv(operations)


@contextmanager
def sums_in_order(device: torch.device) -> Iterator[None]:
    """Inside, CUDA kernels sum in a fixed order, so that a training step that is done again has the same bits.

    Without it, flash attention's backward pass adds to the gradient of the queries in any order: on an H100, steps on
    sequences of 1,500 tokens had other bits each time. An operation that torch cannot order raises RuntimeError and
    names itself.
    """
    if device.type != "cuda":
        yield
        return
    # What kernels overwrite need not be filled first.
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
