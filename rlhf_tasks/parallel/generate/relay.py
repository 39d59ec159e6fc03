"""The messages between the ranks that decode sequences together."""

import json
from collections.abc import Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Following
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine


class Relay:
    """The messages of one group of sequences.

    Per step there are hidden states from each stage to the next (point to point, shapes known on both sides); what
    the tp ranks of the last stage tell each other to draw a token (`vocabulary`); and a broadcast of the drawn tokens
    from the last stage over the pp group. Where responses have turns, what follows them goes the same way: from the
    head to the tp ranks of the last stage, and from each of these over its pp group, behind the tokens. So no stage
    waits for it. All ranks of the replica make these calls in the same order. With one stage and tp 1 nothing is
    sent.
    """

    def __init__(self, engine: Engine) -> None:
        placement, stage = engine.placement, engine.stage
        self.vocabulary = engine.drawn
        self._stages = placement.pp_group(engine.groups.rank)
        self._pp_group = engine.groups[self._stages]
        self._pp_rank = engine.coordinate.pp
        self._head = placement.head(engine.coordinate.dp)
        self._tp_group = engine.groups[placement.tp_group(engine.groups.rank)]
        self._width = stage.widths[0]
        self._dtype = stage.dtype
        self._device = stage.device
        self.is_first_stage = stage.is_first
        self.is_last_stage = stage.is_last
        self._in_flight: list[tuple[dist.Work | None, Tensor]] = []  # tensors must live until they are sent
        self._tokens: Tensor | None = None
        self._following: list[Following] = []

    def receive_hidden(self, tokens: int) -> Tensor:
        """The hidden states [tokens, columns] from the previous stage."""
        hidden = torch.empty(tokens, self._width, dtype=self._dtype, device=self._device)
        dist.recv(hidden, src=self._stages[self._pp_rank - 1], group=self._pp_group)
        return hidden

    def send_hidden(self, hidden: Tensor) -> None:
        """Start to send hidden states [tokens, columns] to the next stage."""
        hidden = hidden.contiguous()
        work = dist.isend(hidden, dst=self._stages[self._pp_rank + 1], group=self._pp_group)
        self._in_flight.append((work, hidden))

    def share_tokens(self, tokens: Tensor) -> None:
        """On the last stage: start to send the drawn tokens [n] int64 to the other stages."""
        self._tokens = tokens
        if self._pp_group is not None:
            work = dist.broadcast(tokens, src=self._stages[-1], group=self._pp_group, async_op=True)
            self._in_flight.append((work, tokens))

    def share_following(self, following: Sequence[Following]) -> None:
        """On the last stage: what follows some turns, of which the head knows, to all ranks of the replica."""
        flat = []
        for sample, ids, most, number, anew, stop in following:
            strings = b"" if stop is None else json.dumps(stop).encode()
            flat += [
                sample,
                len(ids),
                *ids,
                most,
                -1 if number is None else number,
                anew,
                len(strings),
                *strings,
            ]
        numbers = torch.tensor(flat, dtype=torch.int64, device=self._device)
        if self._tp_group is not None:
            numbers = self._receive(numbers, self._head, self._tp_group)
        if self._pp_group is not None:
            for message in (numbers.new_tensor([len(numbers)]), *([numbers] if len(numbers) else [])):
                work = dist.broadcast(message, src=self._stages[-1], group=self._pp_group, async_op=True)
                self._in_flight.append((work, message))
        self._following = _following_of(numbers.tolist())

    def receive_following(self) -> list[Following]:
        """What follows the turns that have been answered, after the tokens of the same step."""
        self._wait_for_sent()
        if self.is_last_stage:
            return self._following
        numbers = torch.zeros(0, dtype=torch.int64, device=self._device)
        return _following_of(self._receive(numbers, self._stages[-1], self._pp_group).tolist())

    def _receive(self, numbers: Tensor, source: int, group: dist.ProcessGroup | None) -> Tensor:
        """The numbers [n] int64 of a rank, on all ranks of a group. numbers: those that count on that rank"""
        size = numbers.new_tensor([len(numbers)])
        dist.broadcast(size, src=source, group=group)
        if not (count := int(size)):
            return numbers[:0]
        received = numbers if len(numbers) == count else numbers.new_empty(count)
        dist.broadcast(received, src=source, group=group)
        return received

    def _wait_for_sent(self) -> None:
        for work, _ in self._in_flight:
            if work is not None:
                work.wait()
        self._in_flight.clear()

    def receive_tokens(self, n: int) -> Tensor:
        """The tokens [n] int64 drawn in the last step. Waits until this rank's messages of that step are sent."""
        self._wait_for_sent()
        if self.is_last_stage:
            assert self._tokens is not None, "no tokens were drawn yet"
            return self._tokens
        tokens = torch.empty(n, dtype=torch.int64, device=self._device)
        dist.broadcast(tokens, src=self._stages[-1], group=self._pp_group)
        return tokens


def _following_of(numbers: list[int]) -> list[Following]:
    following, rest = list[Following](), iter(numbers)
    for sample, count in zip(rest, rest, strict=False):
        ids, most, number, anew = list(islice(rest, count)), next(rest), next(rest), next(rest)
        strings = bytes(islice(rest, next(rest)))
        stop = tuple(json.loads(strings)) if strings else None
        following.append(Following(sample, ids, most, None if number < 0 else number, bool(anew), stop))
    return following
