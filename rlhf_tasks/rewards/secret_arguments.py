"""Secret arguments of a user's code, named in the configuration: `{env: VARIABLE}` or `{block: PREFECT_SECRET}`.

Only the process that runs the code has their values. What it says or prints has `***` in their place.
"""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_tasks.rewards.forms import RewardError
from rlhf_tasks.rewards.user_code import secret_named


class SecretArguments:
    """The secrets of one process. blocks: name of a Prefect Secret block -> its value"""

    def __init__(self, blocks: Mapping[str, str]) -> None:
        self._blocks, self._shown = blocks, set[str]()

    def resolved(self, who: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with values for the secrets that they name. who: for sentences

        From then on this process prints no value. Raises RewardError for a secret that is not set here.
        """
        values = dict(kwargs)
        for argument, given in kwargs.items():
            if (named := secret_named(given)) is None:
                continue
            kind, name = named
            value = os.environ.get(name) if kind == "env" else self._blocks.get(name)
            if value is None:
                what = "environment variable" if kind == "env" else "Prefect Secret block"
                raise RewardError(
                    f"{who}: its kwargs name the {what} {name!r} for {argument}, which is not set here."
                )
            values[argument] = value
            self._hide(value)
        return values

    def scrubbed(self, text: str) -> str:
        """A text with `***` in place of the secrets' values."""
        for secret in sorted(self._shown, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def _hide(self, value: str) -> None:
        if not self._shown:
            sys.stdout, sys.stderr = (_Scrubbed(s, self.scrubbed) for s in (sys.stdout, sys.stderr))
        stripped = value.strip()  # messages may show it without a line break at its end, or as `repr` does
        self._shown |= {value, stripped, repr(stripped)[1:-1]} - {""}


class _Scrubbed:
    """A text stream that replaces secrets by `***`."""

    def __init__(self, stream: Any, scrubbed: Callable[[str], str]) -> None:
        self._stream, self._scrubbed = stream, scrubbed

    def write(self, text: str) -> int:
        return self._stream.write(self._scrubbed(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
