"""Guards around parsers, and Python source that is read without running it."""

import ast
import gc
import sys
import threading
import time

import pytest

from prefect_rlhf.rlhf_tasks.system.reading import (
    ConfigError,
    module_file,
    names_bound,
    names_imported,
    one_line,
    parsed,
    printable,
)
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError

ORDERS = {
    "CSI": ("\x1b[2J", r"\x1b[2J"),
    "OSC, a title": ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
    "CSI as one C1 character": ("\x9b31m", r"\x9b31m"),
    "OSC as one C1 character": ("\x9d8;;x\x9c", r"\x9d8;;x\x9c"),
    "carriage return": ("done\rfail", r"done\rfail"),
    "backspace": ("a\b", r"a\x08"),
    "bidi override": ("\u202etxt.exe\u202c", r"\u202etxt.exe\u202c"),
    "bidi isolate": ("\u2066a\u2069", r"\u2066a\u2069"),
    "half of a surrogate pair": ("\ud800", r"\ud800"),
    "line separator": ("a\u2028b", r"a\u2028b"),
    "tag characters": ("\U000e0041", r"\U000e0041"),
}


@pytest.mark.parametrize(("text", "shown"), ORDERS.values(), ids=ORDERS)
def test_orders_to_a_terminal_are_shown_and_not_given(text: str, shown: str):
    assert printable(f"α {text}\n\tb") == f"α {shown}\n\tb"
    assert str(ConfigError(text)) == shown
    error = RewardError(text, text)
    assert (str(error), error.traceback) == (shown, shown)
    printable(text).encode()


@pytest.mark.parametrize("text", ["plain", "a\nb\tc", "日本語\u3000よ", "naïve\u00a0café", "می‌خواهم", "👩‍💻"])
def test_writing_of_people_stays_as_it_is(text: str):
    assert printable(text) == text


def test_a_line_is_printable_and_short():
    assert one_line("a\x1b[0m\n b.") == r"a\x1b[0m b"
    assert len(one_line("\x9b" * 1000)) < 310


@pytest.mark.parametrize(
    ("source", "bound"),
    [
        ("def f(): g = 1", {"f"}),
        ("async def f(): ...\nclass C:\n    def m(self): ...", {"f", "C"}),
        ("from a import b, c as d\nimport e", {"b", "d", "e"}),
        ("if x:\n    def f(): ...\nelse:\n    f = g = None", {"f", "g"}),
        ("try:\n    from a import b\nexcept ImportError:\n    b = 1", {"b"}),
        ("from a import *", {"*"}),
        ("x.f = 1\nprint(f)", set()),
    ],
)
def test_names_are_those_of_the_top_level(source, bound):
    assert set(names_bound(ast.parse(source).body)) == bound


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("from ours import b\nfrom ours.more import c as d, e\nfrom theirs import f", {"b", "d", "e"}),
        ("from ours import b, c\ndef b(): ...", {"c"}),
        ("from ours import b as c\nb = 1", {"c"}),
        ("import ours\nfrom .ours import b\nfrom ourselves import c", set()),
    ],
)
def test_names_that_come_from_a_package_are_those_that_nothing_else_binds(source, imported):
    assert names_imported(ast.parse(source).body, "ours") == imported


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that fails when it is imported, on the path."""
    inner = tmp_path / "outer_package" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (inner / "module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return inner.parent


def test_a_module_is_found_without_importing_the_packages_around_it(package):
    assert module_file("outer_package") == package / "__init__.py"
    assert module_file("outer_package.inner.module") == package / "inner" / "module.py"
    assert "outer_package" not in sys.modules


def test_a_module_without_source_gives_none_and_one_that_is_not_there_is_refused(package):
    assert module_file("math") is None
    for missing in ("no_such_package.module", "outer_package.other", "outer_package.inner.module.more"):
        with pytest.raises(ModuleNotFoundError, match=missing):
            module_file(missing)


def test_source_is_parsed_though_other_threads_parse_too():
    """Threads change places inside a parse where a callback of the garbage collector runs Python: Dask sets one."""
    source = b"\n".join(b"f(g(h(x + %d, [y, (z, 1)])))" % i for i in range(2000))
    ended = threading.Event()

    def parse_on() -> None:
        while not ended.is_set():
            parsed(source)

    def yield_to_others(*_: object) -> None:
        time.sleep(1e-5)

    thresholds = gc.get_threshold()
    other = threading.Thread(target=parse_on)
    gc.callbacks.append(yield_to_others)
    gc.set_threshold(50)
    try:
        other.start()
        for _ in range(20):
            assert len(parsed(source).body) == 2000
    finally:
        ended.set()
        other.join()
        gc.callbacks.remove(yield_to_others)
        gc.set_threshold(*thresholds)
