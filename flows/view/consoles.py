"""The console of all commands: what others wrote gives no orders to the terminal."""

from typing import Any

import rich.console

from rlhf_tasks.system.reading import printable


class Console(rich.console.Console):
    """Rich's, which prints texts without their control characters; Rich's own markup has its effect."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print texts, made printable, and Rich's own objects."""
        super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **settings)
