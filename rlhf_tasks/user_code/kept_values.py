"""Values of answers that were judged before, and what makes two answers equal to a reward."""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect_rlhf.rlhf_tasks.user_code.forms import Answers, RewardValue

MOST_KEPT = 1 << 20  # values in memory, about 200 bytes each; the oldest go first


class KeptValues:
    """Values by key: an equal answer to an equal row is judged only once.

    Each process appends to a file of its own and reads those of all at its start, so that a resumed run, under
    whatever plan, has what was judged before.
    folder  of the files; None: values are kept in memory only
    name    of the file of this process
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._values: dict[str, RewardValue] = {}
        self._file = None
        if folder is not None:
            folder.mkdir(exist_ok=True)
            for path in sorted(folder.glob("*.jsonl")):
                with open(path, "rb") as file:
                    for line in file:
                        with suppress(ValueError):  # cut by a kill
                            key, value = json.loads(line)
                            self._keep(key, value)
            self._file = os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def _keep(self, key: str, value: RewardValue) -> None:
        self._values[key] = value
        if len(self._values) > MOST_KEPT:
            del self._values[next(iter(self._values))]

    def find(self, keys: Mapping[int, str]) -> dict[int, RewardValue]:
        """Place -> value, for the places whose key is known."""
        return {place: self._values[key] for place, key in keys.items() if key in self._values}

    def keep(self, pairs: Iterable[tuple[str, RewardValue]]) -> None:
        """Keep values, of which some may be known."""
        new = [(key, value) for key, value in pairs if key not in self._values]
        for key, value in new:
            self._keep(key, value)
        if self._file is not None and new:
            lines = b"".join(json.dumps(pair).encode() + b"\n" for pair in new)
            with suppress(OSError):  # a full disk costs repeated work only
                os.write(self._file, b"\n" + lines)  # what is before may be cut


def code_digest(file: str, location: str, arguments: Mapping[str, Any]) -> str:
    """What a reward's values depend on beside the sample: its source file, its place, its configured arguments."""
    source = Path(file).read_bytes() if file and os.path.isfile(file) else b""
    stated = json.dumps([location, arguments], sort_keys=True, default=str)
    return hashlib.sha256(source + stated.encode()).hexdigest()


def keys_of(code: str, answers: Answers, places: Collection[int]) -> dict[int, str]:
    """The keys of answers: code, row, text, and token ids, of which several lists may have one text."""
    keys = {}
    for place in places if code else ():
        row = [answers.prompts[place], {name: column[place] for name, column in answers.columns.items()}]
        stated = [code, *row, answers.completions[place], answers.completion_ids[place]]
        text = json.dumps(stated, sort_keys=True, default=str)
        keys[place] = hashlib.sha256(text.encode()).hexdigest()[:32]
    return keys
