"""Reads what others wrote: guards around parsers, decoders and templates, and Python source that is not run.

A parser fails in more ways than it documents: with an error of its own, a RecursionError, a MemoryError. Inside
`reading`, every failure becomes one error with one sentence that names the place and the fault. Put only calls of
parsers inside it, so that our own mistakes are not reported as the user's. Modules are looked for and inspected
without importing them, because packages may do anything when they are imported, and code for ranks may load torch.
Standard library only.
"""

import ast
import json
import os
import reprlib
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
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


PARSED_TRIES = 10
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def parsed(source: bytes, name: str = "<source>") -> ast.Module:
    """The syntax tree of Python source.

    Python 3.11 counts the depth of the tree for all threads together, and raises SystemError where another thread has
    parsed meanwhile (CPython's issue 106905). Prefect's threads do.
    Raises SyntaxError, ValueError, RecursionError or MemoryError where it is no Python.
    """
    for _ in range(PARSED_TRIES - 1):
        try:
            return ast.parse(source, name)
        except SystemError:
            continue
    return ast.parse(source, name)


def module_file(module: str) -> Path | None:
    """The source file of an importable module; None if it has none, e.g. is compiled, or cannot be located.

    Raises ModuleNotFoundError.
    """
    path: Sequence[str] | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:count]), path)
        if spec is None:
            raise ModuleNotFoundError(module)
        source = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
        path = spec.submodule_search_locations
        if count == len(parts):
            return source
        if source is not None and b"__path__" in source.read_bytes():
            return None  # the package decides at import where its modules are
    return None


def _spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """A module's spec, as importlib finds it, but without importing its parent packages.

    path  the parent package's search path; None for a top-level module
    """
    if "." in name and path is None:
        return None
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        with suppress(KeyError):  # a folder without __init__.py in a package that is not imported
            spec = None if find is None else find(name, path)
            if spec is not None:
                return spec
    folders = [str(Path(place, name.rpartition(".")[2])) for place in path or ()]
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [folder for folder in folders if Path(folder).is_dir()]
    return spec if spec.submodule_search_locations else None


def names_imported(body: Sequence[ast.stmt], package: str) -> set[str]:
    """The names that a module's top level takes from modules of a package, and binds in no other way."""
    taken = [
        node
        for node in body
        if isinstance(node, ast.ImportFrom)
        and not node.level
        and (node.module or "").partition(".")[0] == package
    ]
    return set(names_bound(taken)) - set(names_bound([node for node in body if node not in taken]))


def names_bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that a module's top level binds, also inside if, try and with; `*` for a star import."""
    for node in body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.name
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                yield child.id
            elif isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                yield child.name
            elif isinstance(child, ast.ImportFrom) and child is not node:
                yield from (alias.asname or alias.name for alias in child.names)
