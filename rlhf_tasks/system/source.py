"""Inspects Python source without running it: where a module is, and which names it binds. Standard library only.

It does not import, because packages may do anything when they are imported, and code for ranks may load torch.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path

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
