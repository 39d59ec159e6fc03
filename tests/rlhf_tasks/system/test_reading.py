"""What others wrote, made harmless."""

import pytest

from rlhf_tasks.system.reading import ConfigError, one_line, printable
from rlhf_tasks.user_code.errors import RewardError

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
