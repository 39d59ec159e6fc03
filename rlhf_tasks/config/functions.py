"""Function objects among a configuration's rewards: named by their file, or kept as code by cloudpickle. Torch-free.

A function of an importable module becomes `FILE.py:NAME` or `MODULE:NAME`. One that only this process knows, of a
notebook, of a script, inside another function, or put in the place of a module's own, becomes
`functions/DIGEST.pickle:NAME`, a file in the run folder. DIGEST is of what the function does, not of where it stands:
a cell that is run again unchanged gives the same.
"""

import dis
import hashlib
import inspect
import io
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from prefect_rlhf.rlhf_tasks.system.durable import replace_file
from prefect_rlhf.rlhf_tasks.system.reading import (
    FUNCTIONS,
    ConfigError,
    module_file,
    names_bound,
    one_line,
    parsed,
    shown,
)

FOLDER = "functions"  # in a run folder
SUFFIX = ".pickle"
MOST_BYTES = 64 << 20
"""What a function may take along: more is a model or a data set, which it should load itself."""
BUILTIN_REWARDS = "prefect_rlhf.rlhf_tasks.user_code.builtin_rewards"
_GLOBAL_OPERATIONS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
_CODE = (
    *(
        "co_code",
        "co_exceptiontable",
        "co_consts",
        "co_names",
        "co_varnames",
        "co_freevars",
        "co_cellvars",
        "co_flags",
    ),
    *("co_argcount", "co_kwonlyargcount", "co_posonlyargcount"),
)
_OF_A_CLASS = ("__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__")


class PickledFunction(str):
    """`functions/DIGEST.pickle:NAME`, with the function itself until a run folder has its file.

    content  of the file
    """

    function: Callable[..., Any]
    content: bytes

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # other processes read the file


def is_pickled(location: str) -> bool:
    """Whether a reward's location names a file of this module's."""
    return location.rpartition(":")[0].endswith(SUFFIX)


def located(function: Callable[..., Any]) -> str:
    """Where a function or class is, as a configuration says it: a string, or a PickledFunction.

    Raises ConfigError for what has no name, is no function, or takes along what another process cannot have.
    """
    if not (inspect.isfunction(function) or inspect.isclass(function)):
        raise ConfigError(
            f"a reward is a function or a class, found {shown(function)}. Define a function with def."
        )
    if not function.__name__.isidentifier():
        raise ConfigError(
            "a lambda has no name by which metrics could call the reward. Define a function with def."
        )
    if not _is_importable(function):
        return _pickled(function)
    name = function.__qualname__  # __name__ may be a label
    if function.__module__ == BUILTIN_REWARDS:
        return f"builtin:{name}"
    file = getattr(sys.modules[function.__module__], "__file__", None)
    if file is None or ("." in function.__module__ and _is_found(function.__module__)):
        return f"{function.__module__}:{name}"
    return f"{Path(file).resolve()}:{name}"


def keep_function(location: object, folder: Path) -> None:
    """Write the file of a function that has none yet into a run folder, with mode 0600. Raises OSError."""
    if isinstance(location, PickledFunction):
        path = folder / location.rpartition(":")[0].rpartition(":")[2]
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(path, location.content, 0o600)


def unpickled(path: Path) -> Callable[..., Any]:
    """The function in a file. For the process of a user's code: loading it may run any code."""
    import pickle

    stored: dict[str, Any] = pickle.loads(path.read_bytes())
    for file, lines in stored["sources"].items():  # for tracebacks
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return stored["function"]


def _pickled(function: Callable[..., Any]) -> PickledFunction:
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    content = _content(function, {file: linecache.getlines(file)})
    if len(content) > MOST_BYTES:
        largest = max(_variables(function).items(), key=lambda item: _size(item[1]), default=("", None))[0]
        raise ConfigError(
            f"the reward {function.__name__!r} takes along {len(content) / 1e6:.0f} MB"
            f"{f', most of it {largest!r}' if largest else ''}; {MOST_BYTES / 1e6:.0f} MB are allowed. Load it "
            "inside the function."
        )
    located = PickledFunction(f"{FOLDER}/{_digest(function)}{SUFFIX}:{function.__name__}")
    located.function, located.content = function, content
    return located


def _content(function: Callable[..., Any], sources: Mapping[str, list[str]]) -> bytes:
    try:
        with _its_module_by_value(function):
            return _dumped({"function": function, "sources": sources})
    except Exception as error:  # noqa: BLE001  whatever an object raises that cannot be pickled
        culprit = next(
            (f"{name!r}, {_kind(value)}" for name, value in _variables(function).items() if not _fits(value)),
            "",
        )
        what = culprit or one_line(str(error))
        raise ConfigError(
            f"the reward {function.__name__!r} takes along {what}, and rewards run in a process of their own, which "
            "cannot have that. Make it inside the function (a tensor: take .cpu() along)."
        ) from None


@contextmanager
def _its_module_by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Has cloudpickle write a function that its module has, though not by its source, with its code."""
    import cloudpickle

    module = sys.modules.get(function.__module__)
    is_held = module is not None and _is_held(function)
    if module is None or not is_held or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _dumped(value: object) -> bytes:
    """A value as cloudpickle writes it. Raises TypeError for a tensor in a device's memory, and whatever else cannot
    be pickled."""
    import cloudpickle  # most configurations have no function objects

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> None:
            if _is_on_a_device(obj):
                raise TypeError(_kind(obj))

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_on_a_device(value: Any) -> bool:
    return _is_tensor(value) and value.device.type != "cpu"


def _kind(value: object) -> str:
    device = f" on {getattr(value, 'device', '')}" if _is_on_a_device(value) else ""
    return f"a {type(value).__name__}{device}"


def _fits(value: object) -> bool:
    try:
        _dumped(value)
    except Exception:  # noqa: BLE001  as above
        return False
    return True


def _size(value: object) -> int:
    return len(_dumped(value))


def _variables(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables outside a function that it uses."""
    if not isinstance(function, FunctionType):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    outer = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    names = _global_names(function.__code__)
    return outer | {name: function.__globals__[name] for name in names if name in function.__globals__}


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _global_names(code: CodeType) -> list[str]:
    """The global variables that a code and those inside it name, sorted."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL_OPERATIONS}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names.update(_global_names(inner))
    return sorted(names)


def _is_importable(function: Callable[..., Any]) -> bool:
    """Whether another process finds it by the names of its module and its own."""
    return _is_held(function) and not _is_put_there(function)


def _is_held(function: Callable[..., Any]) -> bool:
    """Whether its module, in this process, has it by its name."""
    if function.__module__ == "__main__":
        return False
    return getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function


def _is_put_there(function: Callable[..., Any]) -> bool:
    """Whether its module's source defines another function by its name, which was decorated or replaced later."""
    code = getattr(function, "__code__", None)
    file = getattr(sys.modules[function.__module__], "__file__", None)
    if code is None or file is None or (code.co_qualname, code.co_filename) == (function.__qualname__, file):
        return False
    return function.__qualname__ in _plainly_defined(file)


@cache
def _plainly_defined(file: str) -> frozenset[str]:
    """The functions of a module that its source defines without decorators, and binds in no other way."""
    try:
        body = parsed(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # compiled, for example
        return frozenset()
    plain = [node for node in body if isinstance(node, FUNCTIONS) and not node.decorator_list]
    others = set(names_bound([node for node in body if node not in plain]))
    return frozenset({node.name for node in plain} - others)


def _is_found(module: str) -> bool:
    try:
        return module_file(module) is not None
    except ModuleNotFoundError:
        return False


def _digest(function: Callable[..., Any]) -> str:
    """16 hexadecimal digits: a digest of what a function does. It is the same in every process."""
    return _Digest().of(function)[:16]


class _Digest:
    """Walks through a function: its code without lines and files, its defaults and the variables it uses.

    The bytes of a pickle would not do: they depend on the order of sets, on which strings are one object, and on
    random ids of classes.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, object]] = {}  # id -> its number, and the object, which stays alive

    def of(self, value: object) -> str:
        digest = hashlib.sha256()
        for word in self._words(value):
            digest.update(f"{len(word)} {word}".encode(errors="surrogatepass"))
        return digest.hexdigest()

    def _words(self, value: object) -> Iterator[str]:
        kind = type(value).__name__
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            yield f"{kind} {value!r}"
            return
        if not isinstance(
            value, tuple | frozenset | CodeType
        ):  # whether equal constants are one is by chance
            if id(value) in self._seen:
                yield f"again {self._seen[id(value)][0]}"
                return
            self._seen[id(value)] = (len(self._seen), value)
        yield kind
        for part in self._parts(value):
            yield from self._words(part)

    def _parts(self, value: Any) -> Iterator[object]:
        match value:
            case list() | tuple():
                yield from (len(value), *value)
            case dict():
                yield from (len(value), *(part for item in value.items() for part in item))
            case set() | frozenset():
                yield from sorted(_Digest().of(each) for each in value)
            case ModuleType():
                yield value.__name__
            case CodeType():
                yield from (getattr(value, name) for name in _CODE)
            case type() | FunctionType() if _is_importable(value):
                yield from (value.__module__, value.__qualname__)
            case FunctionType():
                variables = _variables(value)
                yield from (value.__code__, value.__defaults__, value.__kwdefaults__, variables, vars(value))
            case type():
                yield from (value.__name__, value.__bases__)
                yield {name: its for name, its in vars(value).items() if name not in _OF_A_CLASS}
            case staticmethod() | classmethod():
                yield value.__func__
            case property():
                yield from (value.fget, value.fset)
            case _ if _is_tensor(value):
                yield from _parts_of_a_tensor(value)
            case _:
                yield from _reduced(value)


def _reduced(value: Any) -> tuple[object, ...]:
    """The parts of any object, as pickle sees them."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001  a builtin descriptor, for example, which cloudpickle takes by its name
        return (getattr(value, "__qualname__", type(value).__qualname__),)
    if isinstance(reduced, str):
        return (reduced,)
    function, arguments, state, *items = (*reduced, None, None)[: max(len(reduced), 3)]
    return (function, arguments, state, *(list(each) if each is not None else None for each in items))


def _parts_of_a_tensor(value: Any) -> tuple[object, ...]:
    """Its pickle would name its storage by a number of this process."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        flat = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes()
    return str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()
