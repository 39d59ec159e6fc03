"""Headers of safetensors files: read, checked, and used to compare tensors. Loads no torch."""

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, reading, shown

BITS: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of an element of each dtype."""

FETCH_AGAIN = "Fetch or save it again."
MOST_HEADER_BYTES = 100_000_000  # as the safetensors format defines
MOST_DIMS = 8  # dims of a tensor
LENGTH_BYTES = 8  # a safetensors file begins with this many bytes, its header's length, little-endian
_PIECE_BYTES = 1 << 24  # of a tensor that is compared


def header_of(file: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file: parameter name -> dtype, shape and data_offsets.

    Raises ConfigError when the header is damaged, or when the file has more or fewer bytes than it describes.
    """
    size_bytes = file.stat().st_size
    with reading(file, "not valid safetensors", remedy=FETCH_AGAIN), file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if length > min(MOST_HEADER_BYTES, size_bytes - LENGTH_BYTES):
            raise ValueError(f"its first bytes announce a header of {length:,} bytes")
        header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        ends = _ends(header)
    whole_bytes = LENGTH_BYTES + length + ends
    if size_bytes < whole_bytes:
        raise ConfigError(f"{file} is cut off: {size_bytes} of {whole_bytes} bytes. {FETCH_AGAIN}")
    if size_bytes > whole_bytes:
        raise ConfigError(
            f"{file} has {size_bytes - whole_bytes} bytes more than its header names. {FETCH_AGAIN}"
        )
    return header


def _ends(header: Mapping[str, Mapping[str, Any]]) -> int:
    """Bytes of all tensors together.

    Raises ValueError or another error that `reading` reports, unless the tensors follow each other without gaps and
    each has the bytes that its dtype and shape require.
    """
    at = 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (first, end) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        if dtype not in BITS:
            raise ValueError(f"{shown(name)} has the unknown dtype {shown(dtype)}")
        if len(shape) > MOST_DIMS or not all(
            type(number) is int and 0 <= number < 1 << 62 for number in (*shape, first, end)
        ):
            raise ValueError(
                f"{shown(name)} has the shape {shown(shape)} and the offsets {shown(first)}, {shown(end)}"
            )
        n_bytes = math.prod(shape) * BITS[dtype] // 8
        if (first, end) != (at, at + n_bytes):
            raise ValueError(
                f"{shown(name)} has {shown(n_bytes)} bytes from byte {at} on by dtype and shape, but its "
                f"data_offsets are {first} and {end}"
            )
        at = end
    return at


def same_tensor(*tensors: tuple[Path, str]) -> bool:
    """Whether two tensors of files have the same dtype, shape and bytes."""
    (first, second), kinds = [header_of(file)[name] for file, name in tensors], ("dtype", "shape")
    if any(first[kind] != second[kind] for kind in kinds):
        return False
    with ExitStack() as stack:
        files = [stack.enter_context(file.open("rb")) for file, _ in tensors]
        for file, tensor in zip(files, (first, second), strict=True):
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            file.seek(LENGTH_BYTES + length + tensor["data_offsets"][0])
        left = first["data_offsets"][1] - first["data_offsets"][0]
        while left:
            a, b = (file.read(min(left, _PIECE_BYTES)) for file in files)
            if a != b:
                return False
            left -= len(a)
    return True
