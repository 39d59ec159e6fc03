"""Figures that a measured profile of CPU slots would have, were they a roofline's."""

from planner.profile import preset
from planner.sizes import sizes
from planner.timing import Roofline
from rlhf_tasks.measurements import Grid

EXCHANGES = ("all_reduce", "all_gather", "reduce_scatter", "send", "share", "objects", "redistribute")


def sampled_operations(shape, tp: int):
    """What a roofline says at every point of a grid, as (operation, tokens, context, seconds)."""
    grid = Grid.around(64, 32, 64, 128)
    timings = {
        head: Roofline(preset("cpu-slot"), sizes(shape, head, tp), head, tp, False, 4)
        for head in ("lm", "scalar")
    }
    lm = timings["lm"]
    places = [("forward", n, c) for n in grid.tokens for c in grid.lengths]
    places += [("backward", n, c) for _, n, c in places]
    places += [("prefill", rows * c, c) for rows in grid.rows for c in grid.contexts]
    places += [("decode", rows, c) for rows in grid.rows for c in grid.contexts]
    for kind, tokens, context in places:
        yield f"layer/{kind}", tokens, context, lm.layer_s(kind, tokens, context)
        for head, timing in timings.items():
            if head == "lm" or kind in ("forward", "backward"):
                ends_s = timing.head_s(kind, tokens, context) + timing.embedding_s(kind, tokens)
                yield f"{head}/{kind}", tokens, context, ends_s
    for tokens in (1, *grid.tokens):
        for kind in ("forward", "backward"):
            yield f"embedding/{kind}", tokens, 0, lm.embedding_s(kind, tokens)
    for parameters in (1000, 1_000_000):
        yield "optimizer", parameters, 0, lm.update_s(parameters, 1)
