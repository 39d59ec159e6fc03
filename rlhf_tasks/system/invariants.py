"""What must hold in every run, whatever a user does. Standard library alone."""


class InvariantError(RuntimeError):
    """A rank does not hold what the plan says: parameters of another version, a copy that is gone, other bits.

    It is a fault of the run: the ranks are rebuilt from the last commit. It is no `assert`, so Python's
    `-O` does not remove it.
    """


def require(holds: bool, otherwise: str) -> None:
    """Raises InvariantError with the sentence `otherwise` unless something holds."""
    if not holds:
        raise InvariantError(otherwise)
