"""Words and names that may not come back: a reader stumbles over them.

Phrases are refused in the product and its documentation. Names that say nothing of what a thing is may only become
fewer: where one is replaced, lower its number.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    path
    for package in ("blocks", "deployments", "flows", "planner", "rlhf_tasks")
    for path in sorted((ROOT / package).rglob("*.py"))
]
# The roadmap is a list of what is done, in its own words.
PAGES = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "roadmap.md"]
TEXTS = [*MODULES, *PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

PHRASES = {
    r"whence": "from where",
    r"oftener": "more often",
    r"so-manieth": "every nth",
    r"by turns": "in turn",
    r"beforehand": "before",
    r"(go|goes|went|gone) on": "continue",
    r"(Mend|mend) (it|that|the|this)": "correct",
    r"begun anew": "started again",
    r"data base": "database",
    r"(weights|model|models) (has|have) not\b(?! been)": "lacks, or does not have",
}
NAMES = {"found": 333, "told": 65, "asked": 72, "kept": 161, "given": 94, "held": 207, "own": 117}
"""Name -> how often it may stand in the product, as a variable, an argument, an attribute or a function."""


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_that_has_to_be_read_twice_does_not_come_back(phrase: str):
    words = re.compile(rf"\b{phrase}\b".replace(" ", r"\s+"))
    places = [str(path.relative_to(ROOT)) for path in TEXTS if words.search(path.read_text())]
    assert not places, f"write {PHRASES[phrase]!r}"


def names_in(tree: ast.AST) -> Iterator[str]:
    """Names of variables, arguments, attributes, functions and classes, where they stand."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def test_names_that_do_not_say_what_a_thing_is_become_fewer():
    counts = Counter(name.strip("_") for path in MODULES for name in names_in(ast.parse(path.read_text())))
    more = {name: counts[name] for name, most in NAMES.items() if counts[name] > most}
    assert not more, "name what the thing is"
