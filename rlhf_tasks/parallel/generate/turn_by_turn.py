"""Responses of several turns by an engine that draws one turn at a time: those together that were answered before."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.redistribution import share_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order
from prefect_rlhf.rlhf_tasks.parallel.generate.places import MOST
from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Partners, Turn
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.interruption import leave_if_ended

ANSWER_S = 0.1  # that a head waits for an answer before it looks whether it is still wanted


def turn_by_turn(
    engine: Engine,
    draw: Callable[[SampleBatch, Order], SampleBatch | None],
    batch: SampleBatch,
    order: Order,
) -> SampleBatch | None:
    """As `draw` would draw an order with turns, where it draws orders without. Its contexts are read again for each
    turn, unless it keeps them itself. Collective over the replica."""
    assert order.turns is not None, "an order of turns"
    partners = order.turns.partners
    table = None if partners is None else _Growing(engine, batch, order, partners)
    waiting = share_batch(table and table.waiting(), engine.placement, engine.groups)
    while len(waiting):
        most = max(waiting[MOST].values.tolist())
        params = replace(
            order.params, max_new_tokens=most, min_new_tokens=min(order.params.min_new_tokens, most)
        )
        drawn = draw(waiting, order._replace(params=params, turns=None))
        if table is not None:
            assert drawn is not None, "this rank is a head"
            table.add(drawn)
        waiting = share_batch(table and table.waiting(), engine.placement, engine.groups)
    return None if table is None else table.samples()


class _Growing:
    """The sequences of a head. parts: sample -> key -> its tensors, one for each turn and observation"""

    def __init__(self, engine: Engine, batch: SampleBatch, order: Order, partners: Partners) -> None:
        assert order.turns is not None, "an order of turns"
        self._engine, self._partners, self._ids = engine, partners, batch.ids
        self._dtypes = {
            "input_ids": torch.int64,
            "response_mask": torch.bool,
            "old_logprobs": engine.dtype_of_rows,
        }
        self._dtypes |= dict.fromkeys(
            ("kept_counts", "kept_tokens") if order.record_kept else (), torch.int32
        )
        self._parts: dict[int, dict[str, list[Tensor]]] = {
            sample: {key: [] for key in self._dtypes} for sample in batch.ids
        }
        self._cut = dict.fromkeys(batch.ids, True)
        self._most: dict[int, int] = {}  # of those that are drawn next
        self._numbers = {sample: sample for sample in batch.ids}  # whose random numbers their turns have
        self._unanswered = set[int]()
        for sample, prompt in zip(
            batch.ids, batch["prompt_ids"].to(torch.device("cpu")).split(), strict=True
        ):
            self._read(sample, prompt)
            if len(prompt):
                self._most[sample] = order.turns.most
            else:
                self._unanswered.add(sample)

    def _read(self, sample: int, ids: Tensor) -> None:
        for key, parts in self._parts[sample].items():
            length = 0 if key == "kept_tokens" else len(ids)
            parts.append(ids if key == "input_ids" else torch.zeros(length, dtype=self._dtypes[key]))

    def waiting(self) -> SampleBatch:
        """When some have been answered: the contexts of those that continue, by `prompt_ids`, and the tokens of their
        turns, MOST [1]."""
        while self._unanswered and not self._most:
            leave_if_ended()
            for sample, ids, most, number, anew, stop in self._partners.answered(self._unanswered, ANSWER_S):
                assert stop is None, "what is drawn together has the strings of its order"
                self._unanswered.remove(sample)
                if most:
                    if anew:
                        self._parts[sample] = {key: [] for key in self._dtypes}
                    self._read(sample, torch.tensor(ids, dtype=torch.int64))
                    self._most[sample] = most
                    self._numbers[sample] = sample if number is None else number
        contexts = [torch.cat(self._parts[sample]["input_ids"]) for sample in self._most]
        none, one = torch.zeros(0, dtype=torch.int64), (1,) * len(contexts)
        for sample, context in zip(self._most, contexts, strict=True):
            self._partners.begun(sample, len(context) - 1)
        data = {
            "prompt_ids": Packed(torch.cat([none, *contexts]), tuple(map(len, contexts))),
            MOST: Packed(torch.tensor([*self._most.values()], dtype=torch.int64), one),
        }
        ids = tuple(self._numbers[sample] for sample in self._most)
        return SampleBatch(ids, data).to(self._engine.device)

    def add(self, drawn: SampleBatch) -> None:
        """Add the turns that were drawn of all that waited, as many tokens as each may have."""
        data = drawn.to(torch.device("cpu")).data
        parts = {key: data[key].split() for key in self._dtypes}
        for place, sample in enumerate(self._most):
            whole, mine = {key: of_all[place] for key, of_all in parts.items()}, self._parts[sample]
            start = sum(map(len, mine["input_ids"]))
            stop = min(len(whole["input_ids"]), start + self._most[sample])
            for key, tensor in whole.items():
                if key == "kept_tokens":
                    mine[key].append(tensor[: int(whole["kept_counts"][start:stop].abs().sum())])
                else:
                    mine[key].append(tensor[start:stop])
            self._cut[sample] = bool(data["truncated"].values[place]) or stop < len(whole["input_ids"])
            self._unanswered.add(sample)
            ids, logprobs = mine["input_ids"][-1], mine["old_logprobs"][-1]
            candidates = (mine["kept_counts"][-1], mine["kept_tokens"][-1]) if "kept_counts" in mine else None
            self._partners.ended(sample, Turn(ids.tolist(), self._cut[sample], logprobs, candidates))
        self._most.clear()

    def samples(self) -> SampleBatch:
        """All sequences, by the keys of `generate`."""
        device, data = self._engine.device, {}
        for key, dtype in self._dtypes.items():
            whole = [torch.cat(self._parts[sample][key]) for sample in self._ids]
            data[key] = Packed(torch.cat([torch.zeros(0, dtype=dtype), *whole]), tuple(map(len, whole)))
        truncated = torch.tensor([self._cut[sample] for sample in self._ids], dtype=torch.bool)
        data["truncated"] = Packed(truncated, (1,) * len(self._ids))
        return SampleBatch(self._ids, data).to(device)
