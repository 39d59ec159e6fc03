"""The vocabulary over the tp ranks of a stage, and the messages of those that draw a token from it together."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_tasks.parallel.layout.slices import Layout


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Whose part of the vocabulary is where. Each tp rank has an interval; in the order of tp ranks they cover it.

    sizes    tokens of each tp rank's part
    tp_rank  this rank's number
    group    the tp group; None for one rank
    places   the place of each tp rank in the group, whose ranks are in the order of devices
    """

    sizes: tuple[int, ...]
    tp_rank: int = 0
    group: dist.ProcessGroup | None = None
    places: tuple[int, ...] = (0,)

    @staticmethod
    def of(
        layout: Layout, tp_devices: tuple[int, ...], tp_rank: int, group: dist.ProcessGroup | None
    ) -> "Vocabulary":
        """Of a model in a layout.

        tp_devices  in the order of tp ranks
        """
        sizes = tuple(layout.units("vocab", rank).size for rank in range(len(tp_devices)))
        return Vocabulary(sizes, tp_rank, group, tuple(sorted(tp_devices).index(d) for d in tp_devices))

    @property
    def start(self) -> int:
        """The first token of this rank's part."""
        return sum(self.sizes[: self.tp_rank])

    def gather(self, mine: Tensor) -> Tensor:
        """All ranks' tensors of one shape, in the order of the vocabulary: [tp, ...], bit-equal on all of them."""
        if self.group is None:
            return mine[None]
        gathered = [torch.empty_like(mine) for _ in self.sizes]
        dist.all_gather(gathered, mine.contiguous(), group=self.group)
        return torch.stack([gathered[place] for place in self.places])

    def tokens_of(self, chosen: Tensor) -> list[Tensor]:
        """The tokens that all ranks have chosen: for each row their ids [..] int32, ascending, on the CPU.

        chosen  [n, this rank's part] bool
        """
        counts = self.gather(chosen.sum(1)).cpu()  # [tp, n]
        ids = torch.zeros(int(counts.sum(1).max()), dtype=torch.int32, device=chosen.device)
        mine = chosen.nonzero()[:, 1] + self.start
        ids[: len(mine)] = mine
        of_rank = [
            tokens[: int(count.sum())].split(count.tolist())
            for tokens, count in zip(self.gather(ids).cpu(), counts, strict=True)
        ]
        return [torch.cat(of_row) for of_row in zip(*of_rank, strict=True)]
