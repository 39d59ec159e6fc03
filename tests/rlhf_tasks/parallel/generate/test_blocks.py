"""Which blocks each row has."""

import random

import pytest

from prefect_rlhf.rlhf_tasks.parallel.generate.blocks import Blocks
from prefect_rlhf.rlhf_tasks.parallel.layout.work import BLOCK


def test_a_row_has_a_block_for_each_block_of_its_columns():
    blocks = Blocks(9)
    blocks.enter(BLOCK, None, 0)
    blocks.enter(2 * BLOCK + 1, None, 0)
    assert list(map(len, blocks.rows)) == [1, 3]
    assert len({block for row in blocks.rows for block in row} | {0}) == 5, (
        "each its own, and none has block 0"
    )
    assert blocks.grow(0, BLOCK + 1)
    assert list(map(len, blocks.rows)) == [2, 3]
    assert (blocks.free, blocks.peak) == (4, 5)
    assert not blocks.grow(0, 6 * BLOCK + 1)
    assert blocks.free == 4, "what is not enough is not taken"


def test_blocks_in_common_are_free_when_the_last_row_has_left():
    blocks = Blocks(9)
    blocks.enter(3 * BLOCK + 1, None, 0)
    for _ in range(2):
        blocks.enter(2 * BLOCK + 4, 0, 2 * BLOCK + 3)
    assert [row[:2] for row in blocks.rows] == [blocks.rows[0][:2]] * 3
    assert blocks.free == 9 - 2 - 2 - 1 - 1
    blocks.release(0)
    assert blocks.free == 5, "the others have the first two"
    blocks.keep([2])
    assert (list(map(len, blocks.rows)), blocks.free) == ([3], 6)
    blocks.release(0)
    assert blocks.free == 9


def test_what_was_free_last_is_used_first():
    """So memory that was never needed is never touched."""
    blocks = Blocks(100)
    for _ in range(20):
        blocks.enter(3 * BLOCK, None, 0)
        assert max(blocks.rows[0]) <= 3
        blocks.keep([])
    assert blocks.peak == 3


def test_the_first_rows_take_the_blocks_of_the_last():
    blocks = Blocks(6)
    for columns in (2 * BLOCK, 2 * BLOCK, BLOCK, BLOCK):
        blocks.enter(columns, None, 0)
    wanted = [(2, 2 * BLOCK), (0, 2 * BLOCK), (3, 2 * BLOCK), (1, 2 * BLOCK)]
    assert blocks.extend(wanted) == [1], "row 3 gets a block too"
    assert list(map(len, blocks.rows)) == [2, 0, 2, 2]
    assert blocks.extend([(2, 3 * BLOCK), (0, 3 * BLOCK), (3, 3 * BLOCK)]) == [3]
    assert list(map(len, blocks.rows)) == [3, 0, 3, 0]
    assert blocks.extend([(2, 3 * BLOCK), (0, 4 * BLOCK)]) == [0], "the last that asks loses its own"


@pytest.mark.parametrize("seed", range(5))
def test_the_first_sequence_always_gets_on_and_no_block_is_lost(seed: int):
    """Rows come, grow and leave at random. The memory has room for one of the longest."""
    chance, count = random.Random(seed), 12
    blocks, columns = Blocks(count), list[int]()
    for _ in range(300):
        while len(columns) < 5 and blocks.free >= 3:
            source = chance.randrange(len(columns)) if columns and chance.random() < 0.5 else None
            shared = 0 if source is None else min(columns[source], 2 * BLOCK)
            blocks.enter(max(shared, 1) + 1, source, shared)
            columns.append(max(shared, 1) + 1)
        columns = [min(of_row + chance.randint(0, 9), count * BLOCK) for of_row in columns]
        without = blocks.extend(list(enumerate(columns)))
        assert 0 not in without
        in_use = {block for row in blocks.rows for block in row}
        assert len(in_use) + blocks.free == count
        staying = [row for row in range(len(columns)) if row not in without and chance.random() < 0.95]
        blocks.keep(staying)
        columns = [columns[row] for row in staying]
