"""What is known of one parameter of a model: its place, how it is split, and where files have it. Pure Python."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Unit = Literal["query_head", "kv_head", "column", "vocab"]
"""The units that a sharded dim consists of. A unit is never divided between tp ranks."""

StagePlace = Literal["layer", "first", "last", "ends"]
"""Which stages hold a parameter: its layer's, the first, the last, or first and last (tied embeddings)."""


class FileTensor(NamedTuple):
    """A tensor in files that holds a parameter, or several, one behind the other on the parameters' dim 0.

    shape       of the whole tensor in files
    start       the first row of this parameter
    transposed  files have the parameters' dims in the opposite order (GPT-2's Conv1D)
    """

    name: str
    shape: tuple[int, ...]
    start: int
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the whole model.

    shape             global shape
    place, layer      which stages hold it; the layer's number when place is "layer"
    shard_dim         the dim that tensor parallelism splits; None: every tp rank holds all of it
    unit, unit_size   the units that this dim consists of, and rows per unit
    partial_gradient  True: the gradients of its copies inside one dp rank must be summed (KV heads on several tp
                      ranks, tied embeddings, norms inside heads, routers). False: every copy has the whole gradient
    packed            the tensor that it is a part of in files; None: one of its own, of the same name and shape
    stacked           of a parameter of experts: the names in files of its parts along dim 0, with {} for the number
    """

    name: str
    shape: tuple[int, ...]
    place: StagePlace
    layer: int | None = None
    shard_dim: int | None = None
    unit: Unit | None = None
    unit_size: int = 1
    partial_gradient: bool = False
    packed: FileTensor | None = None
    stacked: str | None = None

    @property
    def stored(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of the tensors in files: the one that it is, or is a part of, or those it is made of."""
        if self.stacked is not None:
            return {self.stacked.format(number): self.shape[1:] for number in range(self.shape[0])}
        return {self.name: self.shape} if self.packed is None else {self.packed.name: self.packed.shape}

    @property
    def dim(self) -> int:
        """The dim to which intervals of rows refer: the sharded one, else the first."""
        return self.shard_dim or 0

    @property
    def length(self) -> int:
        """Number of rows, i.e. the size of that dim."""
        return self.shape[self.dim]

    @property
    def row_size(self) -> int:
        """Elements per row."""
        return math.prod(self.shape) // self.length

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a linear module in a layer, which files hold in a tensor of its own."""
        alone = self.packed is None or (self.packed.transposed and self.packed.shape == self.shape[::-1])
        return self.place == "layer" and len(self.shape) == 2 and alone

    @property
    def module(self) -> str:
        """The last name of its module, as in `q_proj`."""
        return self.name.split(".")[-2]
