"""The data of a search through partial choices: the order of calls, and each call's groups.

A group is all options of a call on meshes of one size. Offloaded options are in no group: the bounds are the same for
their resident twins (planner/search/compiled/arrays.py), and the search tries them at complete choices.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.search.bounds.concurrency_bound import Cover, covering
from planner.search.bounds.relaxation import OPEN, Relaxation
from planner.search.bounds.root_bound import Cycles
from planner.search.compiled.compile import Ints
from planner.search.compiled.tables import Tables


class Tree(NamedTuple):
    """The data of a search. Integers are int64, other numbers float64.

    order     [calls] calls by the least load (seconds x devices) of their options, the heaviest first
    start     [calls + 1] the groups of call c are group[start[c]] .. group[start[c + 1] - 1], fastest first
    group     [groups] rows of planner.search.bounds.relaxation.Relaxation
    """

    order: Ints
    start: Ints
    group: Ints
    cycles: Cycles
    cover: Cover


def search_tree(tables: Tables, r: Relaxation, cycles: Cycles) -> Tree:
    """The data of searches through a problem's partial choices."""
    o, n = r.arrays.options, r.arrays.start[-1]
    groups = n + np.flatnonzero(o.strategy[n:] == OPEN)
    member = groups
    while (member >= n).any():  # down to some option of each group, whose row tells the call
        member = r.below[r.begin[member - n]]
    call = np.searchsorted(r.arrays.start, member, side="right") - 1
    groups = groups[np.lexsort((o.seconds[groups], call))]
    start = np.searchsorted(call, np.arange(r.arrays.n_calls + 1))
    load = o.seconds * o["size"]
    lightest = [load[a:b].min() for a, b in pairwise(r.arrays.start)]
    heaviest = np.argsort(-np.array(lightest), kind="stable")
    return Tree(heaviest, start, groups, cycles, covering(tables.problem.graph))
