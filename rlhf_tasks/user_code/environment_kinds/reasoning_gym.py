"""reasoning-gym's tasks: `reasoning_gym:NAME`, an environment of one turn whose score is the task's own."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from prefect_rlhf.rlhf_tasks.user_code.environment_kinds.starts import START, refuse_other_prompt, row_of


class Environment:
    """A task. kwargs: of the data set, `size` and `seed` (default 0) among them; a row's start is its place there

    answer_tag  the answer is what the turn has between <answer_tag> and </answer_tag> last, or else all of it
    """

    def __init__(self, name: str, answer_tag: str = "answer", **kwargs: Any) -> None:
        self.tasks, self._tag = _tasks(name, json.dumps({"seed": 0, **kwargs})), answer_tag

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        if START not in row:
            raise ValueError(f"the row has no column {START!r}. Make rows with `prefect-rlhf rows`.")
        refuse_other_prompt(row, self.begun(row[START]))

    def begun(self, place: int) -> list[dict[str, str]]:
        """What the policy reads."""
        self._task = self.tasks[place]
        return [{"role": "user", "content": self._task["question"]}]

    def step(self, text: str) -> tuple[str, float, bool]:
        """("", the task's score of the answer, True)"""
        answer = extract_answer(text, self._tag)
        score = self.tasks.score_answer(text.strip() if answer is None else answer, self._task)
        return "", float(score), True


def starts(name: str, kwargs: Mapping[str, Any], first: int) -> Iterator[dict[str, Any]]:
    """A row for each task of the data set from the place `first` on."""
    made = Environment(name, **kwargs)
    return (row_of(place, made.begun(place)) for place in range(first, len(made.tasks)))


@lru_cache(maxsize=4)  # some data sets take seconds to make, and every episode needs one
def _tasks(name: str, kwargs: str) -> Any:
    return reasoning_gym.create_dataset(name, **json.loads(kwargs))
