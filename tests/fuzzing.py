"""What fuzzers share: sound documents with some hostile places, damaged bytes, and what a reader may do with them."""

import json
import os
import resource
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from prefect_rlhf.rlhf_tasks.checkpoint.manifest import CheckpointError
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, printable

SECONDS = float(os.environ.get("FUZZ_SECONDS", "600"))
"""Of each fuzzer in the slow suite."""

CPU_S = (
    20.0  # of one example: one that hangs takes minutes, and a machine may be five times slower than another
)
GROWTH_KIB = 1 << 20  # of this process by one example
ERRORS = (ConfigError, CheckpointError)

HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    10**400,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "x" * 5000,
    "\0",
    "\ud800",
    "a\nb\u2028c",
    "2001-13-45",
    "../../etc/passwd",
    "~nobody/x",
    "{{ 1//0 }}",
    "/",
    "**/*",
    [],
    {},
    [[]],
    {"": {}},
    [None] * 100,
]


def values() -> st.SearchStrategy[Any]:
    """Values that JSON can hold, mostly those that readers stumble over."""
    texts = st.text(max_size=8)
    leaves = st.sampled_from(HOSTILE) | st.integers() | st.floats() | texts
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=6,
    )


def _places(document: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside a document."""
    keys = (
        document.keys()
        if isinstance(document, dict)
        else range(len(document))
        if isinstance(document, list)
        else ()
    )
    found = [(document, key) for key in keys]
    return found + [place for key in keys for place in _places(document[key])]


@st.composite
def changed(draw: st.DrawFn, documents: Callable[[], list[Any]]) -> Any:
    """One of some sound documents, with up to three of its places changed, removed or added to."""
    sound = documents()  # a call: Hypothesis writes out what a strategy is given
    holder = [deepcopy(sound[draw(st.integers(0, len(sound) - 1))])]
    for _ in range(draw(st.integers(0, 3))):
        places = _places(holder)
        container, key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.integers(0, 3)):
            case 0 if container is not holder:
                del container[key]
            case 1 if isinstance(container[key], dict):
                container[key][draw(st.text(max_size=8))] = deepcopy(draw(values()))
            case 2 if isinstance(container[key], list):
                container[key] = container[key] * draw(st.integers(0, 3)) + [deepcopy(draw(values()))]
            case _:
                container[key] = deepcopy(draw(values()))
    return holder[0]


@st.composite
def damaged(draw: st.DrawFn, contents: st.SearchStrategy[bytes]) -> bytes:
    """Bytes, mostly with up to four pieces overwritten, removed, repeated or put in."""
    content = bytearray(draw(contents))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 4]))):
        at = draw(st.integers(0, len(content)))
        size = draw(st.integers(0, 8))
        match draw(st.integers(0, 4)):
            case 0:
                content[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                del content[at : at + size]
            case 2:
                content[at:at] = content[at : at + size] * draw(st.integers(1, 2000))
            case 3:
                content[at:at] = draw(
                    st.binary(max_size=8) | st.sampled_from([b"[" * 2000, b"9" * 5000, b"\xff\xfe"])
                )
            case _:
                del content[at:]
    return bytes(content)


def as_json(documents: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Documents as JSON."""
    return documents.map(lambda document: json.dumps(document).encode())


def survives(read: Callable[[], Any]) -> None:
    """The property: what is read is taken, or refused in sentences of ours; soon, and without much memory."""
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read()
    except ERRORS as error:
        sentence = str(error)
        assert printable(sentence) == sentence, repr(sentence)
        assert 10 < len(sentence) < 3000, sentence
    assert time.process_time() - started < CPU_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_KIB


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int) -> None:
    """So many examples, always the same."""
    settings(max_examples=examples, suppress_health_check=list(HealthCheck))(given(strategy)(check))()


def fuzz_long(strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """New examples for SECONDS, of seeds 1, 2, 3, ..."""
    end, number = time.monotonic() + SECONDS, 0
    rules = settings(
        max_examples=200, derandomize=False, database=None, suppress_health_check=list(HealthCheck)
    )
    while time.monotonic() < end:
        number += 1
        seed(number)(rules(given(strategy)(check)))()
