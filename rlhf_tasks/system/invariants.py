"""Checks of conditions that must hold in every run, whatever a user does. Standard library only."""


class InvariantError(RuntimeError):
    """A rank's state contradicts the plan: parameters of another version, a missing copy, wrong bits.

    It is a fault of the run, so the ranks are rebuilt from the last commit. It is not an `assert`, which Python's
    `-O` would remove.
    """


def require(holds: bool, otherwise: str) -> None:
    """Raises InvariantError with the sentence `otherwise` unless `holds`."""
    if not holds:
        raise InvariantError(otherwise)
