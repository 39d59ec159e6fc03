"""Wraps parsers, decoders and templates of files that others wrote. Standard library only.

A parser fails in more ways than it documents: with an error of its own, a RecursionError, a MemoryError. Inside
`reading`, every failure becomes one error with one sentence that names the place and the fault. Put only calls of
parsers inside it, so that our own mistakes are not reported as the user's.
"""

import json
import os
import reprlib
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_JSON_BYTES = 64 << 20
"""Most bytes of a JSON file that is read whole. Files of model folders, except tokenizers, have at most a few MB."""


class ConfigError(ValueError):
    """A user's input cannot be used. The message is one sentence with the place, the value and what to change.

    It is made printable: names of files, values and templates may be others'.
    """

    def __init__(self, sentence: str = "") -> None:
        super().__init__(printable(sentence))


class DataError(ConfigError):
    """A data set cannot be used. The message is one sentence that names `file:line` (Parquet: `file:row`)."""


@dataclass
class Place:
    """The file or text being read. line: the parser's current line, from 1; 0 if it does not report one."""

    name: str
    line: int = 0


@contextmanager
def reading(
    where: Path | str, predicate: str, error: type[ValueError] = ConfigError, remedy: str = ""
) -> Iterator[Place]:
    """Run a parser; any exception becomes an `error` of one sentence.

    where      the file (a Path), or a text with which the sentence begins; only a file's errors have line numbers
    predicate  comes before the fault in the sentence, e.g. `not valid JSON`
    remedy     a sentence that says what to do
    """
    place, end = Place(str(where)), remedy and f" {remedy}"
    try:
        yield place
    except (ConfigError, error):  # is a sentence already
        raise
    except FileNotFoundError:
        raise error(f"{where}: no such file.{end}") from None
    except OSError as fault:
        raise error(f"{where}: cannot be read ({one_line(fault.strerror or str(fault))}).{end}") from None
    except (
        BaseException
    ) as fault:  # the only place in the code that catches everything: parsers may raise anything
        if not isinstance(fault, Exception) and type(fault).__module__ != "pyo3_runtime":  # a panic of Rust
            raise
        mark = getattr(fault, "problem_mark", None)  # YAML's
        line = mark.line + 1 if mark else getattr(fault, "lineno", 0) or place.line
        at = f":{line}" if line and isinstance(where, Path) else ""
        raise error(f"{where}{at}: {predicate}: {sentence_of(fault)}.{end}") from None


def sentence_of(fault: BaseException) -> str:
    """A parser's error as one line without a full stop."""
    match fault:
        case RecursionError():
            return "nested too deeply"
        case MemoryError():
            return "it takes more memory than there is"
        case UnicodeDecodeError():
            return f"not UTF-8 ({fault.reason} at byte {fault.start})"
        case UnicodeEncodeError():
            return f"half of a surrogate pair at character {fault.start} of a text"
        case KeyError():
            return f"{shown(fault.args[0] if fault.args else None)} is not there"
    said = str(getattr(fault, "problem", None) or fault)
    return one_line(said.partition("\n")[0].partition("; use sys.")[0]) or type(fault).__name__


def refused_by_system(fault: OSError) -> str:
    """One sentence for what the operating system refused, which a path of the user's may have caused."""
    paths = " -> ".join(printable(os.fsdecode(path)) for path in (fault.filename, fault.filename2) if path)
    what = one_line(fault.strerror or str(fault))
    if isinstance(fault, FileNotFoundError) and not paths and not _has_current_folder():
        return "the folder that this command runs in is not there any more. Change to another one."
    if not paths:
        return f"the operating system refused what was asked: {what}. Change that, and run the command again."
    return f"{paths}: {what}. Change what is there, or name another path."


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def one_line(text: str, most: int = 300) -> str:
    """A text as one printable line without a full stop at its end, of at most about `most` characters."""
    line = printable(" ".join(text[: 4 * most].split()))
    return (line if len(line) <= most else f"{line[:most]}...").rstrip(". ")


_ORDERS = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_HARMLESS = frozenset("\n\t\u200c\u200d")  # the last two join letters, and parts of emoji


def printable(text: str) -> str:
    """A text that others wrote, for a terminal, log or page: characters that give orders become escapes.

    These are control characters (ESC among them, and those of U+0080 to U+009F), changes of the writing direction,
    separators of lines and halves of surrogate pairs. Line breaks and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(
        ascii(c)[1:-1] if unicodedata.category(c) in _ORDERS and c not in _HARMLESS else c for c in text
    )


class _Short(reprlib.Repr):
    """A shortened `repr`, for values of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 160
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 200 else f"a number of {x.bit_length()} bits"


_SHORT = _Short()


def shown(value: object) -> str:
    """A value's `repr` for a sentence, shortened if it is long."""
    return one_line(_SHORT.repr(value))


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """A file's content. Call it inside `reading`. Raises ConfigError for a file of more than `most_bytes` bytes."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ConfigError(f"{path}: has more than {most_bytes:,} bytes, too many for a file of this kind.")
    return content


def read_json(path: Path, error: type[ValueError] = ConfigError, remedy: str = "") -> dict[str, Any]:
    """The object in a JSON file. Raises `error`, naming file and line."""
    with reading(path, "not valid JSON", error, remedy):
        document = json.loads(read_bytes(path, MOST_JSON_BYTES))
    if not isinstance(document, dict):
        raise error(
            f"{path}: expected a JSON object, found {type(document).__name__}.{remedy and f' {remedy}'}"
        )
    return document
