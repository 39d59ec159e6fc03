"""A baseline: every model on its own devices, as OpenRLHF places them (arXiv:2405.11143).

Roles get consecutive meshes, the largest first. One mesh grows at a time, the one that shortens the iteration most,
until the cluster is full. Then two roles exchange devices as long as that helps.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations

from planner.plan.build import PlanError
from planner.search.compiled.tables import Tables, Value

Sizes = tuple[int, ...]
Rank = tuple[float, float, float]  # excess bytes, seconds per iteration, seconds of all calls

STEP = 1.15  # the least ratio of a mesh's size to the next smaller size that is tried


class _Disjoint:
    """The best choices for tuples of mesh sizes, in devices: one size for each of `roles`."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        graph = tables.problem.graph
        self.roles = graph.roles
        self.calls = [[i for i, call in enumerate(graph.calls) if call.role == role] for role in self.roles]
        self.sizes = [self._common_sizes(calls) for calls in self.calls]
        self.best: dict[Sizes, tuple[Rank, list[int]] | None] = {}
        self.evaluations = 0

    def _common_sizes(self, calls: Sequence[int]) -> list[int]:
        """Sizes of meshes on which all given calls have options, thinned out to ratios of at least STEP."""
        common = set.intersection(*({o.size for o in self.tables.options[call]} for call in calls))
        kept: list[int] = []
        for size in sorted(common):
            if not kept or size >= STEP * kept[-1]:
                kept.append(size)
        return kept

    def smallest(self) -> Sizes:
        """The smallest meshes that fit side by side.

        For rising sizes n, each role gets its smallest mesh of at least n devices. Very small meshes may have no
        room, because on large clusters they begin only at a few hosts (planner/pricing/options.py).
        """
        tried = [
            tuple(next((size for size in own if size >= least), own[-1]) for own in self.sizes)
            for least in sorted({size for own in self.sizes for size in own})
        ]
        return next((sizes for sizes in tried if self.rank(sizes)[0] < float("inf")), tried[0])

    def largest(self) -> list[int] | None:
        """The fastest options on the largest meshes of about equal size that fit side by side; None if there are
        none."""
        if not all(self.sizes):
            return None
        for most in sorted({size for own in self.sizes for size in own}, reverse=True):
            sizes = tuple(max((size for size in own if size <= most), default=own[0]) for own in self.sizes)
            if allowed := self._allowed(sizes):
                return self._fastest(allowed)
        return None

    def _fastest(self, allowed: Sequence[Sequence[int]]) -> list[int]:
        """The fastest of each call's allowed options."""
        options = self.tables.options
        return [min(numbers, key=lambda n: options[c][n].seconds) for c, numbers in enumerate(allowed)]

    def rank(self, sizes: Sizes) -> Rank:
        """The rank of the best choice on meshes of these sizes, lower is better; infinite if they do not fit side by
        side."""
        if sizes not in self.best:
            self.best[sizes] = self._settle(sizes)
        found = self.best[sizes]
        return found[0] if found else (float("inf"), 0.0, 0.0)

    def _settle(self, sizes: Sizes) -> tuple[Rank, list[int]] | None:
        """Coordinate descent: the best option of one call after another, until none improves."""
        allowed = self._allowed(sizes)
        if allowed is None:
            return None
        choice = self._fastest(allowed)
        best = self._rank(choice)
        improved = True
        while improved:
            improved = False
            for call, numbers in enumerate(allowed):
                for number in numbers:
                    changed = [*choice[:call], number, *choice[call + 1 :]]
                    if number != choice[call] and (rank := self._rank(changed)) < best:
                        choice, best, improved = changed, rank, True
        return best, choice

    def _rank(self, choice: Sequence[int]) -> Rank:
        self.evaluations += 1
        value: Value = self.tables.evaluate(choice)
        seconds = sum(self.tables.options[call][number].seconds for call, number in enumerate(choice))
        return value.excess_bytes, value.time_s, seconds

    def _allowed(self, sizes: Sizes) -> list[list[int]] | None:
        """[calls] numbers of each call's options on its role's mesh; None if the meshes do not fit side by side."""
        allowed: list[list[int]] = [[] for _ in self.tables.calls]
        position = 0
        for role in sorted(range(len(sizes)), key=lambda role: -sizes[role]):
            starts = [
                {o.first for o in self.tables.options[call] if o.size == sizes[role] and o.first >= position}
                for call in self.calls[role]
            ]
            first = min(set.intersection(*starts), default=None)
            if first is None:
                return None
            position = first + sizes[role]
            for call in self.calls[role]:
                allowed[call] = [
                    n
                    for n, o in enumerate(self.tables.options[call])
                    if o.first == first and o.size == sizes[role]
                ]
        return allowed if all(allowed) else None

    def grown(self, sizes: Sizes) -> Iterator[Sizes]:
        """All ways to make one role's mesh a step larger."""
        for role in range(len(sizes)):
            yield from self._stepped(sizes, role, 1)

    def exchanged(self, sizes: Sizes) -> Iterator[Sizes]:
        """All ways to make one role's mesh a step smaller, and another's a step larger or not."""
        for loser, winner in permutations(range(len(sizes)), 2):
            for smaller in self._stepped(sizes, loser, -1):
                yield smaller
                yield from self._stepped(smaller, winner, 1)

    def _stepped(self, sizes: Sizes, role: int, step: int) -> Iterator[Sizes]:
        place = self.sizes[role].index(sizes[role]) + step
        if 0 <= place < len(self.sizes[role]):
            yield (*sizes[:role], self.sizes[role][place], *sizes[role + 1 :])


def side_by_side(tables: Tables) -> list[int] | None:
    """A choice with every role on its own devices, about equally many for each; None if there is none.

    It may lack memory. It takes no search, and it is a start for annealing that is far from plans that share devices.
    """
    return _Disjoint(tables).largest()


def disjoint_choice(tables: Tables) -> tuple[list[int], int]:
    """(choice, evaluations): every role on its own devices.

    Raises PlanError when the cluster has fewer devices than roles need, or memory does not suffice.
    """
    search = _Disjoint(tables)
    for role, sizes in zip(search.roles, search.sizes, strict=True):
        if not sizes:
            raise PlanError(
                f"The calls of {role} fit no mesh of one size on a cluster of {tables.problem.cluster}, as roles on "
                "devices of their own have to. Enlarge the cluster, or let roles share devices."
            )
    best = sizes = search.smallest()
    while fitting := [grown for grown in search.grown(sizes) if search.rank(grown)[0] < float("inf")]:
        sizes = min(fitting, key=search.rank)
        best = min(best, sizes, key=search.rank)
    while True:
        better = min(search.exchanged(best), key=search.rank, default=best)
        if search.rank(better) >= search.rank(best):
            break
        best = better
    found = search.best[best]
    if found is None or found[0][0] > 0:
        short = f": at best a device lacks {found[0][0]:.0f} bytes" if found else ""
        raise PlanError(
            f"The roles {', '.join(search.roles)} do not fit a cluster of {tables.problem.cluster} on devices of "
            f"their own{short}. Enlarge the cluster, or let roles share devices."
        )
    return found[1], search.evaluations
