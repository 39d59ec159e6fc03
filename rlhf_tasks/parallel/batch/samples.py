"""Batches of variable-length samples on the data-parallel heads: packed, never padded."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """One key's data for several samples, concatenated along dim 0.

    values   [sum(lengths), ...] any dtype; a scalar per sample has length 1, text is UTF-8 bytes (uint8)
    lengths  number of rows of each sample
    """

    values: Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.values.shape[0] == sum(self.lengths), (tuple(self.values.shape), self.lengths)

    @staticmethod
    def of(parts: Sequence[Tensor]) -> "Packed":
        """Pack one tensor [length, ...] per sample."""
        return Packed(torch.cat(list(parts)), tuple(int(p.shape[0]) for p in parts))

    @staticmethod
    def of_texts(texts: Iterable[str]) -> "Packed":
        """Pack strings as UTF-8 bytes."""
        return Packed.of([torch.tensor(list(t.encode()), dtype=torch.uint8) for t in texts])

    def split(self) -> list[Tensor]:
        """One view [length, ...] per sample."""
        return list(self.values.split(list(self.lengths)))

    def texts(self) -> list[str]:
        """The strings that `of_texts` packed."""
        return [bytes(part.tolist()).decode() for part in self.split()]

    def to(self, device: torch.device) -> "Packed":
        return Packed(self.values.to(device), self.lengths)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples by global id, with the same keys for every sample.

    ids   global sample ids, in the order of the packed data. Each id occurs once, except where a sample is several
          sequences that one call reads, such as the two answers of a pair: they follow each other under its id
    data  key -> Packed of len(ids) samples
    """

    ids: tuple[int, ...]
    data: Mapping[str, Packed]

    def __post_init__(self) -> None:
        for key, packed in self.data.items():
            assert len(packed.lengths) == len(self.ids), (key, len(packed.lengths), len(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: str) -> Packed:
        return self.data[key]

    def select(self, ids: Sequence[int]) -> "SampleBatch":
        """The samples `ids`, in that order. Raises KeyError for an id that is not in the batch."""
        if tuple(ids) == self.ids:
            return self
        position = {sample: i for i, sample in enumerate(self.ids)}
        return self.take([position[sample] for sample in ids])

    def take(self, places: Sequence[int]) -> "SampleBatch":
        """The samples at the given places (from 0) of this batch, in that order."""
        data = {}
        for key, packed in self.data.items():
            parts = packed.split()
            data[key] = Packed.of([parts[i] for i in places]) if places else Packed(packed.values[:0], ())
        return SampleBatch(tuple(self.ids[i] for i in places), data)

    def renamed(self, names: Mapping[str, str]) -> "SampleBatch":
        """The same samples under other keys. names: old key -> new key; a key that is not among them stays"""
        return SampleBatch(self.ids, {names.get(key, key): packed for key, packed in self.data.items()})

    def only(self, keys: Iterable[str]) -> "SampleBatch":
        """The same samples with these keys alone. Raises KeyError for one that they do not have."""
        return SampleBatch(self.ids, {key: self.data[key] for key in keys})

    def to(self, device: torch.device) -> "SampleBatch":
        return SampleBatch(self.ids, {key: packed.to(device) for key, packed in self.data.items()})


class SampleStore:
    """The samples on one data-parallel head: (key, sample id) -> tensor [length, ...]."""

    def __init__(self) -> None:
        self._data: dict[str, dict[int, Tensor]] = {}

    def put(self, batch: SampleBatch) -> None:
        """Store every key of a batch. Existing data of a sample are replaced."""
        for key, packed in batch.data.items():
            self._data.setdefault(key, {}).update(zip(batch.ids, packed.split(), strict=True))

    def get(self, ids: Sequence[int], keys: Iterable[str]) -> SampleBatch:
        """A packed batch of the named keys. Raises KeyError naming the key when a sample is missing."""
        data = {}
        for key in keys:
            held = self._data.get(key, {})
            missing = [sample for sample in ids if sample not in held]
            if missing:
                raise KeyError(f"key {key!r}: samples {missing[:4]} are not on this rank")
            data[key] = Packed.of([held[sample] for sample in ids])
        return SampleBatch(tuple(ids), data)

    def has(self, sample: int, key: str) -> bool:
        return sample in self._data.get(key, {})

    def length(self, sample: int, key: str) -> int:
        """Number of rows that a sample has under a key."""
        return int(self._data[key][sample].shape[0])

    def held(self, ids: Iterable[int]) -> list[SampleBatch]:
        """What is here of some samples: a batch with one key for each key that any of them has."""
        wanted = list(ids)
        batches: list[SampleBatch] = []
        for key, held in self._data.items():
            here = tuple(sample for sample in wanted if sample in held)
            if here:
                batches.append(self.get(here, [key]))
        return batches

    def drop(self, ids: Sequence[int], keys: Iterable[str] | None = None) -> None:
        """Forget samples under some keys; default: under every key. Unknown ids are ignored."""
        for held in self._data.values() if keys is None else [self._data.get(key, {}) for key in keys]:
            for sample in ids:
                held.pop(sample, None)

    def clear(self) -> None:
        self._data.clear()
