"""An engine's weights as files have them, in memory that a generator on the same host reads.

Each rank of a replica writes the rows that it alone counts (`Layout.primary`), under the names and in the shapes of
Hugging Face's files, with adapters added to the weights below them. So the reader need not know the layout or our
names, and what it fuses or splits further is its own affair.
"""

from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.comm.groups import all_reduce, broadcast_json
from prefect_rlhf.rlhf_tasks.parallel.comm.shared_weights import (
    Place,
    SharedWeights,
    described,
    digest_of_all,
    places_of,
)
from prefect_rlhf.rlhf_tasks.parallel.model.weights import write_rows
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine


class Handover:
    """The memory of one model's weights on this rank. Made when the first engine is written."""

    def __init__(self) -> None:
        self._memory: SharedWeights | None = None
        self._described: tuple[list[Place], torch.dtype] = ([], torch.float32)
        self._of: tuple[int, str] = (-1, "")

    def write(self, engine: Engine) -> dict[str, Any] | None:
        """Write an engine's weights. Collective over its replica.

        Returns, on the head, what a reader needs, as JSON: `path` and `size` of the memory, `places`, `dtype`,
        `version`, `digests` (name -> digest) and `digest` of all; None elsewhere. Raises OSError where the replica's
        ranks are on several hosts.
        """
        layout, stage = engine.stage.layout, engine.stage
        replica = layout.placement.replica(engine.coordinate.dp)
        group, head = engine.groups[replica], layout.placement.heads[engine.coordinate.dp]
        shapes = {name: shape for spec in layout.parameters for name, shape in spec.stored.items()}
        places, size = places_of(shapes, stage.dtype.itemsize)
        if engine.is_head and (self._memory is None or self._of != (size, self._memory.path)):
            self._open(size, None)
        path = broadcast_json(self._memory.path if self._memory else "", head, group, engine.device)
        if self._of != (size, path):
            self._open(size, path)
        assert self._memory is not None
        self._described = places, stage.dtype
        tensors = self.tensors()
        parameters, rows_here = stage.named_slices(), layout.held(stage.holder)
        for name, rows in layout.primary(stage.holder).items():
            if rows.size:
                spec = layout.specs[name]
                mine = merged(engine, name, parameters[name])
                part = mine.narrow(spec.dim, rows.start - rows_here[name].start, rows.size)
                write_rows(tensors.__getitem__, spec, rows, part)
        all_reduce(torch.ones(1), group)  # all have written
        if not engine.is_head:
            return None
        digests = self._memory.digests(places)
        return {
            "path": path,
            "size": size,
            "places": described(places),
            "dtype": str(stage.dtype).removeprefix("torch."),
            "version": engine.version,
            "digests": digests,
            "digest": digest_of_all(digests),
        }

    def tensors(self) -> dict[str, Tensor]:
        """What was written last, by the names of files."""
        assert self._memory is not None, "tensors before write"
        return self._memory.tensors(*self._described)

    def _open(self, size: int, path: str | None) -> None:
        self.close()
        self._memory = SharedWeights(size, path)
        self._of = (size, self._memory.path)

    def close(self) -> None:
        """Let go of the memory."""
        if self._memory is not None:
            self._memory.close()
        self._memory, self._of = None, (-1, "")


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
