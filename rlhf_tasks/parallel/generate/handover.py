"""An engine's weights as files have them, in memory that a generator on the same host reads.

Each rank of a replica shares the rows that it alone counts (`Layout.primary`), as parts of the tensors that Hugging
Face's files have, with adapters added to the weights below them. So the reader need not know the layout or our names,
and what it fuses or splits further is its own affair.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import broadcast_json
from prefect_rlhf.rlhf_tasks.parallel.comm.shared_weights import (
    ALIGN,
    HostMemory,
    Lent,
    Region,
    assembled,
    digest_of_all,
    digests_of,
    parts_of,
    shared,
)
from prefect_rlhf.rlhf_tasks.parallel.generate.beside import GenerationFault
from prefect_rlhf.rlhf_tasks.parallel.model.weights import stored_parts
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

CPU = torch.device("cpu")


class Handover:
    """What this rank shares of one model's weights: copies in memory of the host, which is made when the first engine
    is written, or what it has `lent`, of which only merged weights are copies."""

    def __init__(self) -> None:
        self._memory: HostMemory | None = None
        self.lent = Lent()
        self._handed: dict[str, Any] = {}

    def write(self, engine: Engine, lends: bool = False) -> dict[str, Any] | None:
        """Share an engine's weights. Collective over its replica.

        lends  to a reader on the same GPUs: until they are taken back, the weights neither change nor are freed
        Returns, on the head, what a reader needs, as JSON: `ranks` (what each has `shared`), `shapes` (of tensors, by
        name), `dtype`, `version`, `digests` (of the parts of each) and `digest` of all; None elsewhere.
        """
        self.lent.take_back()
        layout, stage = engine.stage.layout, engine.stage
        shapes = {name: shape for spec in layout.parameters for name, shape in spec.stored.items()}
        if lends:
            mine = shared(_parts(engine), self.lent.where)
        else:
            size = sum(each.nbytes for each in stage.named_slices().values())
            size += ALIGN * sum(len(spec.stored) for spec in layout.parameters)
            if self._memory is None or self._memory.where["size"] != size:
                self.close()
                self._memory = HostMemory(size)
            copied, where = self._memory.copied, self._memory.where
            self._memory.begin()
            parts = ((name, region, copied(part)) for name, region, part in _parts(engine))
            mine = shared(parts, lambda _: where)
        replica = layout.placement.replica(engine.coordinate.dp)
        ranks = [broadcast_json(mine, rank, engine.groups[replica], CPU) for rank in replica]
        if not engine.is_head:
            return None
        of_ranks = [rank.pop("digests") for rank in ranks]
        digests = {name: " ".join(of[name] for of in of_ranks if name in of) for name in shapes}
        self._handed = {
            "ranks": ranks,
            "shapes": shapes,
            "dtype": str(stage.dtype).removeprefix("torch."),
            "version": engine.version,
            "digests": digests,
            "digest": digest_of_all(digests),
        }
        return self._handed

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """On the head, what was written last to memory of the host, by the names of files. Raises GenerationFault
        where other bits are there."""
        parts, ours = parts_of(self._handed), self._handed["digests"]
        if other := [name for name, theirs in digests_of(parts).items() if theirs != ours[name]]:
            raise GenerationFault(f"the head finds other bits of {other[0]!r} than ranks have handed over")
        return assembled(parts, self._handed["shapes"], CPU)

    def close(self) -> None:
        """Let go of the memory."""
        self.lent.take_back()
        if self._memory is not None:
            self._memory.close()
        self._memory = None


def _parts(engine: Engine) -> Iterator[tuple[str, Region, Tensor]]:
    """What this rank shares: name of a tensor of files, region of it, and what belongs there."""
    layout, holder, parameters = engine.stage.layout, engine.stage.holder, engine.stage.named_slices()
    primary = layout.primary(holder) if engine.coordinate.cp == 0 else {}  # other cp ranks have the same
    for name, rows in primary.items():
        if rows.size:
            spec, first = layout.specs[name], layout.held(holder)[name].start
            mine = merged(engine, name, parameters[name]).narrow(spec.dim, rows.start - first, rows.size)
            yield from stored_parts(spec, rows, mine)


def merged(engine: Engine, name: str, weight: Tensor) -> Tensor:
    """This rank's slice of a weight, with the adapter of its module added: W + alpha / rank * B A (arXiv:2106.09685).

    Of a split module, one of A and B is split as it is, and the other is whole: their product is the slice of B A.
    """
    lora, module = engine.layout.lora, name.removesuffix(".weight")
    adapters = engine.stage.trained_slices() if lora is not None else {}
    if lora is None or f"{module}.lora_A.weight" not in adapters:
        return weight.detach()
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = (adapters[f"{module}.lora_{half}.weight"].detach().to(wide) for half in "AB")
    return (weight.detach().to(wide) + lora.scaling * (b @ a)).to(weight.dtype)
