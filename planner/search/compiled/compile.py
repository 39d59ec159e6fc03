"""How the plan search's inner loops are compiled.

Numba links every called function into its caller and optimises all of it again at each level, including wrappers for
Python. So only the few functions that Python calls have wrappers, and only these are cached next to the source.
"""

import pickle
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numpy.typing import NDArray

from prefect_rlhf.rlhf_tasks.spec import IN_FLIGHT

LINKED = (
    "search.annealing",
    "search.branch_and_bound",
    *(f"search.bounds.{name}" for name in ("cycles", "period_bound", "relaxation")),
    *(f"search.compiled.{name}" for name in ("arrays", "compile", "evaluator", "memory_peaks")),
    "pricing.resharding",
)
"""The planner's modules whose functions and constants are linked into compiled code."""

# What compiled code reads and writes.
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PLANNER = Path(__file__).parents[2]

_njit: Any = njit  # its type lists neither all options nor the cache

inner: Callable[..., Any] = _njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorator of functions that only compiled code calls. A call from Python crashes."""


def compiled(function: Callable[..., Any]) -> Any:
    """Decorator of functions that Python calls: compiled at the first call; later processes load them."""
    dispatcher = _njit(error_model="numpy")(function)
    dispatcher._cache = _KeptCode(function)
    return dispatcher


class _Index(IndexDataCacheFile):
    """The index of kept code. One that cannot be read counts as empty: numba unpickles an index before it looks
    whether it is stale, and a class that was renamed since is not there any more."""

    def _load_index(self) -> dict[Any, str]:
        try:
            return super()._load_index()
        except (
            pickle.UnpicklingError,
            AttributeError,
            ImportError,
            EOFError,
            ValueError,
            IndexError,
            TypeError,
        ):
            return {}


class _KeptCode(FunctionCache):
    """A cache of compiled code that becomes stale when any source linked into it changes.

    Numba itself checks only the file of the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = _source_stamp(function.__module__.removeprefix("prefect_rlhf.planner."))
        self._cache_file = _Index(self.cache_path, self._impl.filename_base, stamp)


@cache
def _source_stamp(module: str) -> str:
    """A hash of the sources of a module and of the modules in LINKED that it imports, directly or indirectly, and of
    the one constant from elsewhere."""
    sources = {"": str(IN_FLIGHT).encode()}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in sources:
            sources[name] = PLANNER.joinpath(*name.split(".")).with_suffix(".py").read_bytes()
            waiting += [
                other
                for other in LINKED
                if f"from prefect_rlhf.planner.{other} import".encode() in sources[name]
            ]
    return sha256(b"".join(sources[name] for name in sorted(sources))).hexdigest()
