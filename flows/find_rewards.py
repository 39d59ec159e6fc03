"""Is a configured reward there? Looked up in the source, without running it: a reward may import anything.

What this cannot see, such as an import that fails, the reward's own process reports when it starts.
"""

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_tasks.config import ConfigError
from rlhf_tasks.config_parts import RewardFunction

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def check_rewards(rewards: Sequence[RewardFunction]) -> None:
    """Raises ConfigError for the first reward whose file, module or function cannot be found."""
    for reward in rewards:
        place, _, name = reward.function.rpartition(":")
        path = Path(place) if place.endswith(".py") else _module_file(reward.function, place)
        if path is None:
            continue
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except OSError as error:
            raise ConfigError(
                f"reward {reward.function}: {path} cannot be read ({error.strerror}). Name an existing file."
            ) from None
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"reward {reward.function}: {path} is no Python source ({error}).") from None
        names = set(_bound(tree.body))
        if name not in names and "*" not in names:
            functions = ", ".join(node.name for node in tree.body if isinstance(node, _FUNCTIONS)) or "none"
            raise ConfigError(
                f"reward {reward.function}: {path} has no function {name!r} (functions there: {functions})."
            )


def _module_file(location: str, module: str) -> Path | None:
    """The source of an importable module; None when it has none, being compiled for example."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigError(
            f"reward {location}: there is no module {module!r}. Install it, or name a file: path/to/file.py:function."
        )
    source = spec.origin or ""
    return Path(source) if source.endswith(".py") else None


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that a module's top level binds, inside if, try and with too; `*` for a star import."""
    for node in body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node.name
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                yield child.id
            elif isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
                yield child.name
            elif isinstance(child, ast.ImportFrom) and child is not node:
                yield from (alias.asname or alias.name for alias in child.names)
