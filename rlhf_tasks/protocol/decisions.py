"""What the controller decides by the metrics of finished calls (docs/adr/0040-decisions.md).

A decision is a pure function of journalled numbers. What such a function loads is checked, so that it cannot read a
clock, the environment or a tensor. The journal has what each was made of; a later attempt makes it again, and
compares.
"""

import builtins
import dis
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pkgutil import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from prefect_rlhf.rlhf_tasks.spec import (
    ROWS,
    STOP,
    WHOLE,
    CallNode,
    Decision,
    ExecutionPlan,
    NodeResult,
    PlanNode,
)
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, one_line

Function = Callable[..., float]
"""(before, metrics, **constants) -> value"""

_BUILT_IN = (
    "abs all any bool dict divmod enumerate filter float int isinstance len list map max min pow range reversed "
    "round sorted str sum tuple zip ArithmeticError KeyError ValueError ZeroDivisionError"
)
SAFE = frozenset(_BUILT_IN.split())
"""The built-in names that such a function may use: their results depend on their arguments alone."""

TIMED = "throughput/"
"""Begins the names of metrics that a clock gives. Decisions are not made of them: a repeated iteration has others."""

DECIDED = "decided"
"""Begins the names of metrics that are decisions; also the key of a line of the lineage."""


def pure(decision: Decision) -> Function:
    """The function of a decision. Raises ConfigError where it cannot be loaded, and where it reads anything but its
    arguments, constants, `math` and other such functions."""
    try:
        function = resolve_name(decision.function)
    except (ImportError, AttributeError, ValueError) as fault:
        raise ConfigError(
            f"the decision {decision.name!r} is made by {decision.function}, which cannot be imported "
            f"({one_line(str(fault))}). Name a function at the top level of a module."
        ) from None
    read = (
        next(_others(function, set()), None) if isinstance(function, FunctionType) else "what is no function"
    )
    if read is not None:
        raise ConfigError(
            f"the decision {decision.name!r} ({decision.function}) reads {read}, which no journal has, so a resumed "
            "run could decide otherwise. Decide by the metrics of the call, `before` and constants alone."
        )
    return function


def _others(function: FunctionType, seen: set[FunctionType]) -> Iterator[str]:
    """What a function reads besides its arguments and constants."""
    if function in seen:
        return
    seen.add(function)
    yield from (f"the variable {name!r} around it" for name in function.__code__.co_freevars)
    if not all(
        map(_is_constant, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
    ):
        yield "a default that can change"
    yield from ("the order of a set" for code in _codes(function.__code__) if _has_set(code))
    for instruction in _instructions(function.__code__):
        name = instruction.argval
        opname, is_private = instruction.opname, str(name).startswith("_")
        if opname in _LOADS_ELSEWHERE or (opname in ("LOAD_ATTR", "LOAD_METHOD") and is_private):
            yield repr(name)
        elif opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if name in function.__globals__:
                value = function.__globals__[name]
                if isinstance(value, FunctionType):
                    yield from _others(value, seen)
                elif value is not math and not _is_constant(value):
                    yield f"the module {name!r}" if isinstance(value, ModuleType) else repr(name)
            elif name not in SAFE or not hasattr(builtins, name):
                yield repr(name)


CHANGING = frozenset(["datetime", "os", "random", "secrets", "socket", "subprocess", "time", "uuid"])
"""Modules of clock, environment and chance."""


def changing(program: FunctionType, seen: set[FunctionType] | None = None) -> str | None:
    """What a program, or a function that it calls by name, reads of CHANGING; None where that is nothing. Unlike a
    decision it may use all else."""
    seen = seen or set()
    seen.add(program)
    for instruction in _instructions(program.__code__):
        name, value = instruction.argval, program.__globals__.get(str(instruction.argval))
        if instruction.opname == "IMPORT_NAME" and str(name).partition(".")[0] in CHANGING:
            return str(name)
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or value is None:
            continue
        if _module_of(value).partition(".")[0] in CHANGING:
            return str(name)
        if isinstance(value, FunctionType) and value not in seen and (read := changing(value, seen)):
            return read
    return None


def _module_of(value: Any) -> str:
    """The module that a value is, or that defines it or its type."""
    if isinstance(value, ModuleType):
        return value.__name__
    return str(getattr(value, "__module__", None) or type(value).__module__)


_LOADS_ELSEWHERE = ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    return (instruction for each in _codes(code) for instruction in dis.get_instructions(each))


def _has_set(code: CodeType) -> bool:
    """Whether code has a set, whose order may differ in each process, but for `in {...}` of constants."""
    instructions = list(dis.get_instructions(code))
    return any(
        one.opname == "BUILD_SET" or (isinstance(one.argval, frozenset) and then.opname != "CONTAINS_OP")
        for one, then in pairwise(instructions)
    )


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant(each) for each in cast(Iterable[object], value))
    return value is None or type(value) in (bool, int, float, str)


class DecisionError(ValueError):
    """A decision cannot be made, or is not what the run has decided before. A retry would find the same."""


class _Reads(NamedTuple):
    """Which value a node reads. source: the node after which it is made; None: it is `first`. back: iterations"""

    decision: Decision
    source: str | None
    back: int


def _reads(node: PlanNode, decision: Decision, made_by: list[CallNode], ended: set[str]) -> _Reads:
    """Which value a node reads. ended: names of the nodes that come before it in an iteration"""
    part = node.part if isinstance(node, CallNode) else WHOLE
    if decision.each_part and part.of == len(made_by) > 1:
        return _Reads(decision, made_by[part.number - 1].name if part.number else None, 0)
    source = made_by[-1].name
    return _Reads(decision, source, int(decision.name == ROWS or source not in ended))


class Decisions:
    """The decisions of an attempt.

    made_after  node -> the decisions that are made when it has ended
    readers     node -> what it reads
    """

    def __init__(
        self, plan: ExecutionPlan, past: Iterable[Mapping[str, Any]] = (), first_iteration: int = 0
    ) -> None:
        """past: the lines of the lineage that have decisions, those of the commit from which the attempt begins.
        first_iteration: the attempt's.
        Raises DecisionError where one would be made otherwise now, ConfigError as `pure`."""
        sources: dict[str, tuple[Decision, list[CallNode]]] = {}
        self.made_after: dict[str, list[Decision]] = {}
        for nodes in plan.calls.values():
            for decision in nodes[0].call.decides:
                sources[decision.name] = decision, nodes
                for node in nodes if decision.each_part else nodes[-1:]:
                    self.made_after.setdefault(node.name, []).append(decision)
        self._functions = {name: pure(decision) for name, (decision, _) in sources.items()}
        self._before = {  # node, decision -> the node after which the same iteration has made its `before`
            (node.name, decision.name): nodes[number - 1].name if number and decision.each_part else None
            for decision, nodes in sources.values()
            for number, node in enumerate(nodes)
        }
        self.readers: dict[str, list[_Reads]] = {}
        ended: set[str] = set()
        for node in plan.nodes if sources else ():
            if reads := [_reads(node, *sources[name], ended) for name in node.decided_by if name in sources]:
                self.readers[node.name] = reads
            ended.add(node.name)
        self._when = {node.name: nodes[0].call.when for nodes in plan.calls.values() for node in nodes}
        self._stop = sources[STOP][1][-1].name if STOP in sources else None
        self._values: dict[tuple[int, str, str], float] = {}  # by iteration, node after which, name
        self._begins = first_iteration
        self._latest = {name: decision.first for name, (decision, _) in sources.items()}  # before the attempt
        for line in past:
            for name, (decision, nodes) in sources.items():
                if name in line[DECIDED][DECIDED]:
                    self._replay(line, decision, nodes[-1].name)

    def values(self, iteration: int, node: str) -> dict[str, float] | None:
        """What a reader reads, by the decisions' names; None while one is not made."""
        values: dict[str, float] = {}
        for decision, source, back in self.readers[node]:
            value: float | None = decision.first
            if source is not None and iteration >= back:
                value = self._value(iteration - back, source, decision.name)
            if value is None:
                return None
            values[decision.name] = value
        return values

    def _value(self, iteration: int, node: str, name: str) -> float | None:
        """What was decided. Of an iteration before the attempt that has decided no such thing: the latest one."""
        value = self._values.get((iteration, node, name))
        return self._latest[name] if value is None and iteration < self._begins else value

    def make(self, iteration: int, node: str, result: NodeResult) -> NodeResult:
        """A node has ended: make its decisions. Returns the result with them, as journals get it.

        Raises DecisionError where a function fails, or gives no finite number.
        """
        metrics = {
            name: value
            for name, value in result.metrics.items()
            if math.isfinite(value) and not name.startswith(TIMED)
        }
        made = {one.name: self._make(iteration, node, one, metrics) for one in self.made_after[node]}
        values = {f"{DECIDED}/{name}": one["value"] for name, one in made.items()}
        details = {**result.details, DECIDED: {"metrics": metrics, DECIDED: made}}
        return replace(result, metrics={**result.metrics, **values}, details=details)

    def runs(self, iteration: int, node: str) -> bool:
        """Whether a call runs, by the decision that it names."""
        when = self._when.get(node)
        return not when or (self.values(iteration, node) or {}).get(when, 0.0) > 0

    def stops(self, iteration: int) -> bool | None:
        """Whether an iteration is the last one; None while that is not decided."""
        if self._stop is None:
            return False
        value = self._values.get((iteration, self._stop, STOP))
        return None if value is None else value > 0

    def forget(self, before: int, since: int) -> None:
        """Drop what was decided in iterations before one and since another."""
        self._values = {key: value for key, value in self._values.items() if before <= key[0] < since}

    def _make(
        self, iteration: int, node: str, decision: Decision, metrics: Mapping[str, float]
    ) -> dict[str, Any]:
        """Make a decision; what it was made of, and its value. Where its call did not run, it stays as it was."""
        before: float | None = None
        if not decision.each_part:
            before = self._value(iteration - 1, node, decision.name)
        elif (source := self._before[node, decision.name]) is not None:
            before = self._value(iteration, source, decision.name)
        if before is None:
            before = decision.first
        runs = self.runs(iteration, node)
        value = self._called(decision, before, metrics, decision.constants) if runs else before
        self._values[iteration, node, decision.name] = value
        return {"before": before, "constants": decision.constants, "ran": runs, "value": value}

    def _called(
        self, decision: Decision, before: float, metrics: Mapping[str, float], constants: Mapping[str, float]
    ) -> float:
        who = f"the decision {decision.name!r} ({decision.function})"
        try:
            value = cast(object, self._functions[decision.name](before, dict(metrics), **constants))
        except Exception as fault:
            raise DecisionError(
                f"{who} has raised {type(fault).__name__}: {one_line(str(fault))}. The call's metrics are "
                f"{', '.join(sorted(metrics)) or 'none'}."
            ) from fault
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise DecisionError(f"{who} has given {value!r}, which is no finite number. Let it give one.")
        return float(value)

    def _replay(self, line: Mapping[str, Any], decision: Decision, node: str) -> None:
        """Take a decision from the journal, after making it again of the same numbers.

        node  after which the plan makes it last: the one of the journal has another name where the call had other
              parts then, and nothing later reads what was decided after the parts before
        """
        iteration, was, metrics = (
            line["iteration"],
            line[DECIDED][DECIDED][decision.name],
            line[DECIDED]["metrics"],
        )
        value = was["value"]
        made = self._called(decision, was["before"], metrics, was["constants"]) if was["ran"] else value
        if made != value:
            raise DecisionError(
                f"the decision {decision.name!r} of iteration {iteration + 1} was {value:g}, and would be "
                f"{made:g} now: {decision.function} has changed. Put it back as it was, or begin a new run."
            )
        self._values[iteration, node, decision.name] = self._latest[decision.name] = value
