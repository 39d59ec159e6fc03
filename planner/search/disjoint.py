"""Every model on devices of its own, as OpenRLHF places them (arXiv:2405.11143): a baseline.

Roles get consecutive meshes, the largest first. Meshes grow step by step, at each step the one that shortens the
iteration most, until the cluster is full; then devices are exchanged between two roles while that helps.
"""

from collections.abc import Iterator, Sequence
from itertools import permutations

from planner.plan.build import PlanError
from planner.search.compiled.tables import Tables, Value

Sizes = tuple[int, ...]
Rank = tuple[float, float, float]  # excess bytes, seconds per iteration, seconds of all calls

STEP = 1.15  # ratio of a mesh's size to the next smaller one that is tried, at least


class _Disjoint:
    """Values of size tuples: one mesh size per role, in the order of `roles`."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        graph = tables.problem.graph
        self.roles = graph.roles
        self.calls = [[i for i, call in enumerate(graph.calls) if call.role == role] for role in self.roles]
        self.sizes = [self._common_sizes(calls) for calls in self.calls]
        self.best: dict[Sizes, tuple[Rank, list[int]] | None] = {}
        self.evaluations = 0

    def _common_sizes(self, calls: Sequence[int]) -> list[int]:
        """Sizes of meshes on which all calls of a role have options, thinned to STEP."""
        common = set.intersection(*({o.size for o in self.tables.options[call]} for call in calls))
        kept: list[int] = []
        for size in sorted(common):
            if not kept or size >= STEP * kept[-1]:
                kept.append(size)
        return kept

    def smallest(self) -> Sizes:
        """The smallest meshes with room side by side: of each role the first that has as many devices as some size.
        (On large clusters small meshes begin at few hosts: planner/pricing/options.py.)"""
        tried = [
            tuple(next((size for size in own if size >= least), own[-1]) for own in self.sizes)
            for least in sorted({size for own in self.sizes for size in own})
        ]
        return next((sizes for sizes in tried if self.rank(sizes)[0] < float("inf")), tried[0])

    def largest(self) -> list[int] | None:
        """The fastest options on the largest meshes, about as large for all roles, that have room side by side."""
        if not all(self.sizes):
            return None
        for most in sorted({size for own in self.sizes for size in own}, reverse=True):
            sizes = tuple(max((size for size in own if size <= most), default=own[0]) for own in self.sizes)
            if allowed := self._allowed(sizes):
                return self._fastest(allowed)
        return None

    def _fastest(self, allowed: Sequence[Sequence[int]]) -> list[int]:
        options = self.tables.options
        return [min(numbers, key=lambda n: options[c][n].seconds) for c, numbers in enumerate(allowed)]

    def rank(self, sizes: Sizes) -> Rank:
        """How good the best choice on meshes of these sizes is; infinite when they have no room."""
        if sizes not in self.best:
            self.best[sizes] = self._settle(sizes)
        found = self.best[sizes]
        return found[0] if found else (float("inf"), 0.0, 0.0)

    def _settle(self, sizes: Sizes) -> tuple[Rank, list[int]] | None:
        """The best option of one call after the other, until none gets better."""
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
        """Call -> its options on its role's mesh; None when the meshes do not fit side by side."""
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
        """One role's mesh a step larger."""
        for role in range(len(sizes)):
            yield from self._stepped(sizes, role, 1)

    def exchanged(self, sizes: Sizes) -> Iterator[Sizes]:
        """One role's mesh a step smaller, and another's larger or not."""
        for loser, winner in permutations(range(len(sizes)), 2):
            for smaller in self._stepped(sizes, loser, -1):
                yield smaller
                yield from self._stepped(smaller, winner, 1)

    def _stepped(self, sizes: Sizes, role: int, step: int) -> Iterator[Sizes]:
        place = self.sizes[role].index(sizes[role]) + step
        if 0 <= place < len(self.sizes[role]):
            yield (*sizes[:role], self.sizes[role][place], *sizes[role + 1 :])


def side_by_side(tables: Tables) -> list[int] | None:
    """A choice with every role on its own devices, about as many for each, whether it fits memory or not; None when
    there is none. It takes no search; near it are other plans than near those that share devices."""
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
