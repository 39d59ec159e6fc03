"""The boundary to whatever reads what others wrote: parsers, decoders, templates. Standard library alone.

A parser fails in more ways than it documents: by an error of its own, by too deep a recursion, for want of memory.
What is read inside `reading` fails in one way: with one sentence that names the place and the fault. Only calls of
parsers stand inside it, so that no mistake of ours is taken for the user's.
"""

import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_JSON_BYTES = 64 << 20
"""Of a JSON file that is read whole: the largest of a model folder besides its tokenizer have a few MB."""


class ConfigError(ValueError):
    """What a user gave cannot be used: one sentence naming the place, the value and what to change."""


class DataError(ConfigError):
    """A data set that cannot be used: one sentence that names `file:line` (Parquet: `file:row`)."""


@dataclass
class Place:
    """What is read. line: where the parser stands, from 1; 0 where it does not say."""

    name: str
    line: int = 0


@contextmanager
def reading(
    where: Path | str, predicate: str, error: type[ValueError] = ConfigError, remedy: str = ""
) -> Iterator[Place]:
    """Run a parser; whatever it raises becomes an `error` of one sentence.

    where      the file, or else what a sentence about it begins with (then without a line's number)
    predicate  what stands before the fault, as in `not valid JSON`
    remedy     a sentence that says what to do
    """
    place, end = Place(str(where)), remedy and f" {remedy}"
    try:
        yield place
    except (ConfigError, error):  # a sentence already
        raise
    except FileNotFoundError:
        raise error(f"{where}: no such file.{end}") from None
    except OSError as fault:
        raise error(f"{where}: cannot be read ({one_line(fault.strerror or str(fault))}).{end}") from None
    except BaseException as fault:  # the only one: this is what the boundary is for
        if not isinstance(fault, Exception) and type(fault).__module__ != "pyo3_runtime":  # a panic of Rust
            raise
        mark = getattr(fault, "problem_mark", None)  # YAML's
        line = mark.line + 1 if mark else getattr(fault, "lineno", 0) or place.line
        at = f":{line}" if line and isinstance(where, Path) else ""
        raise error(f"{where}{at}: {predicate}: {sentence_of(fault)}.{end}") from None


def sentence_of(fault: BaseException) -> str:
    """What a parser's error says, as one line without a full stop."""
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


def one_line(text: str, most: int = 300) -> str:
    """A text of any size and content as one printable line without a full stop at its end."""
    words = " ".join(text[: 4 * most].split())
    printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
    return (printable if len(printable) <= most else f"{printable[:most]}...").rstrip(". ")


class _Short(reprlib.Repr):
    """`repr` of a value of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 160
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 200 else f"a number of {x.bit_length()} bits"


_SHORT = _Short()


def shown(value: object) -> str:
    """A value in a sentence, cut short where it is large."""
    return one_line(_SHORT.repr(value))


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """A file's content; stands inside `reading`. Raises ConfigError for a file that is larger."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ConfigError(f"{path}: has more than {most_bytes:,} bytes, which is no file of this kind.")
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
