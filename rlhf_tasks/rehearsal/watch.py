"""How near each wait of a rehearsal has come to its deadline."""

from dataclasses import dataclass

NEAR = 0.5
"""Share of its deadline from which a wait counts as near: within a factor of two of firing."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The longest of the waits of one kind, by its share of what it may take."""

    used_s: float
    limit_s: float
    near: int = 0

    @property
    def share(self) -> float:
        """How much of its time it has used; 1: its deadline fires."""
        return self.used_s / self.limit_s


class WaitLog:
    """Kinds of waits, each with its longest one and the number of those that came near their deadline."""

    def __init__(self) -> None:
        self.waits: dict[str, Wait] = {}

    def used(self, what: str, used_s: float, limit_s: float) -> None:
        """A wait has ended after `used_s` seconds; after `limit_s` it would have been a fault."""
        known = self.waits.get(what)
        near = (known.near if known else 0) + (used_s >= NEAR * limit_s)
        if known is None or used_s / limit_s > known.share:
            self.waits[what] = Wait(used_s, limit_s, near)
        elif near != known.near:
            self.waits[what] = Wait(known.used_s, known.limit_s, near)

    @property
    def near(self) -> dict[str, Wait]:
        """The kinds with a wait that came within a factor of two of its deadline, the nearest first."""
        found = {what: wait for what, wait in self.waits.items() if wait.near}
        return dict(sorted(found.items(), key=lambda item: -item[1].share))
