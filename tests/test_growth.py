"""How much there is to know: growth is a decision that a review sees, since it changes a number of this table."""

import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm

ROOT = Path(__file__).parents[1]
PRODUCT = [
    path
    for package in ("flows", "rlhf_tasks", "planner", "blocks", "deployments")
    for path in (ROOT / package).rglob("*.py")
]
NODE = re.compile(
    r"\b(Fetch|Transfer|Reallocate|Release|Onload|Offload|Save|SaveSamples|Sync|Evaluate)Node\b"
)

TABLE = {
    "files": 376,
    "hundreds of lines": 821,
    "lines of the longest file": 710,
    "modules of the fullest folder": 17,
    "configuration paths of PPO": 160,
    "configuration paths of GRPO": 155,
    "hundreds of words in docs": 352,
    "files that name a kind of plan node": 16,
}


def lines(path: Path) -> int:
    return path.read_text().count("\n")


def paths_of(config: type[BaseModel]) -> int:
    """Fields of a configuration and of the sections in it; of alternatives, those of each."""
    return sum(
        1 + sum(map(paths_of, dict.fromkeys(_sections(field.annotation))))
        for field in config.model_fields.values()
    )


def _sections(kind: object) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [section for part in get_args(kind) for section in _sections(part)]


def fullest_folder() -> int:
    modules = Counter(path.parent for path in PRODUCT if path.name != "__init__.py")
    return max(modules.values())


COUNTS = {
    "files": lambda: len(PRODUCT),
    "hundreds of lines": lambda: round(sum(map(lines, PRODUCT)) / 100),
    "lines of the longest file": lambda: max(map(lines, PRODUCT)),
    "modules of the fullest folder": fullest_folder,
    "configuration paths of PPO": lambda: paths_of(algorithm("ppo").config),
    "configuration paths of GRPO": lambda: paths_of(algorithm("grpo").config),
    "hundreds of words in docs": lambda: round(
        sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md")) / 100
    ),
    "files that name a kind of plan node": lambda: sum(
        bool(NODE.search(path.read_text())) for path in PRODUCT
    ),
}


@pytest.mark.parametrize("what", TABLE)
def test_what_there_is_to_know_has_the_size_that_was_decided(what: str):
    assert COUNTS[what]() <= TABLE[what], f"if this is meant, write the new number of {what} into TABLE"
