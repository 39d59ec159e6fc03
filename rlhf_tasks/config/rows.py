"""What a configuration reads of a run's tokenised rows, to say what its samples are made from."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class RunRows(Protocol):
    """The rows of a run by index. `rlhf_tasks.data.token_file.TokenFile` holds them."""

    def __len__(self) -> int: ...

    @property
    def longest(self) -> int:
        """Tokens of the longest list of ids of all rows."""
        ...

    def row_of(self, sample_id: int, seed: int, weights: Sequence[float] = ...) -> int:
        """The row that a global sample id means. weights: of the sources"""
        ...

    def values(self, index: int) -> Mapping[str, Any]:
        """The values of a row by key: lists or arrays of numbers, or text."""
        ...
