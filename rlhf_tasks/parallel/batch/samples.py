"""Batches of variable-length samples on the data-parallel heads: packed, never padded."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import LENGTHS


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

    def joined(self, counts: Sequence[int]) -> "Packed":
        """The first counts[0] samples as one, the next counts[1] as another, and so on."""
        lengths = iter(self.lengths)
        return Packed(self.values, tuple(sum(islice(lengths, count)) for count in counts))

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

    def reorder(self, ids: Sequence[int]) -> "SampleBatch":
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

    def select(self, *keys: str) -> "SampleBatch":
        """The same samples with these keys alone. Raises KeyError for one that they do not have."""
        return SampleBatch(self.ids, {key: self.data[key] for key in keys})

    def union(self, other: "SampleBatch") -> "SampleBatch":
        """The same samples with the keys of both; also written `|`.

        Raises ValueError where the samples are not the same ones in the same order, and for a key of both whose
        values differ.
        """
        if self.ids != other.ids:
            raise ValueError(
                f"union of the samples {_some(self.ids)} and {_some(other.ids)}: they are not the same in the same "
                "order. Reorder one of the batches."
            )
        for key in self.data.keys() & other.data.keys():
            mine, theirs = self[key], other[key]
            if mine.lengths != theirs.lengths or not torch.equal(mine.values, theirs.values):
                raise ValueError(
                    f"union: both batches have {key!r}, with other values. Select the keys of one of them."
                )
        return SampleBatch(self.ids, {**self.data, **other.data})

    __or__ = union

    def repeat(self, n: int) -> "SampleBatch":
        """Each sample n times, side by side, under its id."""
        return self.take([place for place in range(len(self)) for _ in range(n)])

    def sequences(self) -> "SampleBatch":
        """The sequences of all samples, each under its sample's id, by the keys that have rows for tokens."""
        if LENGTHS not in self.data:
            return self
        of_samples = [part.tolist() for part in self[LENGTHS].split()]
        ids = tuple(sample for sample, of_one in zip(self.ids, of_samples, strict=True) for _ in of_one)
        lengths, tokens = tuple(chain.from_iterable(of_samples)), self["input_ids"].lengths
        data = {
            key: Packed(packed.values, lengths)
            for key, packed in self.data.items()
            if packed.lengths == tokens
        }
        if "kept_tokens" in self.data:
            counts = [int(part.abs().sum()) for part in data["kept_counts"].split()]
            data["kept_tokens"] = Packed(self["kept_tokens"].values, tuple(counts))
        return SampleBatch(ids, data)

    def read(self) -> dict[str, Packed]:
        """The keys by which a model reads the samples: `input_ids`, and LENGTHS where they have it."""
        return {key: self.data[key] for key in ("input_ids", LENGTHS) if key in self.data}

    def chunk(self, n: int) -> list["SampleBatch"]:
        """n parts of consecutive samples, equal but for one sample; `concat` is the inverse."""
        ends = [len(self) * part // n for part in range(n + 1)]
        return [self.take(range(ends[part], ends[part + 1])) for part in range(n)]

    def pad(self, key: str, fill: float = 0) -> Tensor:
        """A key's values as a rectangle [n, longest, ...], with `fill` after each sample's rows."""
        return pad_sequence(self[key].split(), batch_first=True, padding_value=fill)

    def unpad(self, like: str, **padded: Tensor) -> "SampleBatch":
        """The same samples with further keys, whose rectangles [n, longest, ...] have rows where `like` has them.

        Raises ValueError for a rectangle of another size.
        """
        lengths, made = self[like].lengths, dict(self.data)
        for key, values in padded.items():
            if tuple(values.shape[:2]) != (len(self), max(lengths, default=0)):
                raise ValueError(
                    f"unpad: {key!r} is {list(values.shape)}, but {like!r} has {len(self)} samples of up to "
                    f"{max(lengths, default=0)} rows. Give it that shape."
                )
            rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
            made[key] = Packed.of(rows) if rows else Packed(values.flatten(0, 1), ())
        return SampleBatch(self.ids, made)

    def to(self, device: torch.device) -> "SampleBatch":
        return SampleBatch(self.ids, {key: packed.to(device) for key, packed in self.data.items()})


def concat(batches: Sequence[SampleBatch]) -> SampleBatch:
    """The samples of all batches, one after the other. Raises ValueError where their keys differ."""
    first, *others = batches
    for other in others:
        if other.data.keys() != first.data.keys():
            raise ValueError(
                f"concat of batches with the keys {', '.join(first.data)} and {', '.join(other.data)}. Select the "
                "same keys of all."
            )
    data = {
        key: Packed(
            torch.cat([batch[key].values for batch in batches]),
            tuple(length for batch in batches for length in batch[key].lengths),
        )
        for key in first.data
    }
    return SampleBatch(tuple(sample for batch in batches for sample in batch.ids), data)


def _some(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:4])) + (", ..." if len(ids) > 4 else "")


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
