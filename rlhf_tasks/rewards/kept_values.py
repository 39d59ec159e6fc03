"""Values of rewards that are kept in the run folder, so that an equal answer to an equal row is judged only once.

Standard library only. Each process appends to a file of its own and reads those of all at its start, so that a
resumed run, under whatever plan, finds what was judged before.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_tasks.rewards.forms import RewardValue

MOST = 1 << 20  # values in memory, about 200 bytes each; the oldest go first


class KeptValues:
    """Values by key.

    folder  of the files; None: values are kept in memory only
    name    of the file of this process
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._values: dict[str, RewardValue] = {}
        self._file = None
        if folder is not None:
            folder.mkdir(exist_ok=True)
            for path in sorted(folder.glob("*.jsonl")):
                self._read(path)
            self._file = os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def _read(self, path: Path) -> None:
        with open(path, "rb") as file:
            for line in file:
                with suppress(ValueError):  # cut by a kill
                    key, value = json.loads(line)
                    self._keep(key, value)

    def _keep(self, key: str, value: RewardValue) -> None:
        self._values[key] = value
        if len(self._values) > MOST:
            del self._values[next(iter(self._values))]

    def find(self, keys: Mapping[int, str]) -> dict[int, RewardValue]:
        """Place -> value, for the places whose key is known."""
        return {place: self._values[key] for place, key in keys.items() if key in self._values}

    def keep(self, pairs: Iterable[tuple[str, RewardValue]]) -> None:
        """Keep values."""
        pairs = list(pairs)
        for key, value in pairs:
            self._keep(key, value)
        if self._file is not None:
            lines = b"".join(json.dumps(pair).encode() + b"\n" for pair in pairs)
            with suppress(OSError):  # a full disk costs repeated work only
                os.write(self._file, b"\n" + lines)  # what is before may be cut


def code_digest(file: str, location: str, arguments: Mapping[str, Any]) -> str:
    """What a reward's values depend on beside the sample: its source file, its place, its configured arguments."""
    source = Path(file).read_bytes() if file and os.path.isfile(file) else b""
    stated = json.dumps([location, arguments], sort_keys=True, default=str)
    return hashlib.sha256(source + stated.encode()).hexdigest()


def key_of(code: str, prompt: Any, columns: Mapping[str, Any], completion: str, ids: Sequence[int]) -> str:
    """The key of an answer: code, row, text, and token ids, of which several lists may have one text."""
    stated = json.dumps([code, prompt, columns, completion, ids], sort_keys=True, default=str)
    return hashlib.sha256(stated.encode()).hexdigest()[:32]
