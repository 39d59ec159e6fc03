"""Tools as the process that runs them loads them: functions, classes and servers of the user's, and their schemas."""

import asyncio
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect_rlhf.rlhf_tasks.user_code.child import MARGIN_S, Caller, importing
from prefect_rlhf.rlhf_tasks.user_code.errors import MOST_MESSAGE, RewardError, shortened
from prefect_rlhf.rlhf_tasks.user_code.forms import module_at
from prefect_rlhf.rlhf_tasks.user_code.tools.server import Ends, ToolServer

_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_NOBODY = object()  # in the place of an instance, while methods are described


@dataclass(frozen=True)
class Tool:
    """A tool: a function, the arguments that the model does not give, and the JSON schema of the others.

    server  that offers it and ends with the episode; None where all share it, and for what no server offers
    """

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    parameters: Mapping[str, Any]
    server: ToolServer | None = None


Tools = Mapping[str, Tool]
"""By the names by which the model calls them."""


class Schemas:
    """What a process answers that only looks at tools."""

    def __init__(self, begin: Mapping[str, Any], caller: Caller) -> None:
        self._caller, self._tools = caller, begin["tools"]
        self.loop = asyncio.Runner()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The schemas of each entry of `tools`: of a function one, of a class and a server several."""
        return {"schemas": [self._of(each, request["timeout_s"] - MARGIN_S) for each in self._tools]}

    def _of(self, stated: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        if stated["mcp"] is not None:
            return self.loop.run(_server(stated, self._caller).schemas(timeout_s))
        location, kwargs = stated["function"], [*stated["kwargs"]]
        target = _at(location)
        if not inspect.isclass(target):
            return [_schema(f"tool {location}", target, location.rpartition(":")[2], kwargs)]
        try:
            inspect.signature(target).bind(**stated["kwargs"])
        except TypeError as error:
            raise RewardError(f"tool {location}: its kwargs do not fit the class: {error}.") from None
        methods = dict(_methods(target))
        if not methods:
            raise RewardError(
                f"tool {location}: the class has no method without _ that the model could call."
            )
        return [_schema(f"tool {location}.{name}", method, name, ()) for name, method in methods.items()]


def loaded(
    stated: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]], caller: Caller
) -> Callable[[], Tools]:
    """What gives an episode its tools of an entry of `tools`. A class has a new instance for each, and so has
    a server with `per_episode`; any other is shared by all. It starts with the first call.

    schemas  of these tools, as a process of `Schemas` has answered
    Raises RewardError.
    """
    parameters = {each["function"]["name"]: each["function"]["parameters"] for each in schemas}
    if stated["mcp"] is not None:
        per_episode, ends = stated["mcp"]["per_episode"], Ends()

        def of_a_server() -> Tools:
            server = _server(stated, caller, ends)
            ended = server if per_episode else None
            return {name: Tool(partial(server.call, name), {}, of, ended) for name, of in parameters.items()}

        if per_episode:
            return of_a_server
        tools = of_a_server()
        return lambda: tools
    target = _at(stated["function"])
    kwargs = caller.secrets.resolved(f"tool {stated['function']}", stated["kwargs"])
    if not inspect.isclass(target):
        ((name, of),) = parameters.items()
        one = {name: Tool(target, kwargs, of)}
        return lambda: one

    def of_an_instance() -> Tools:
        instance = target(**kwargs)
        return {name: Tool(getattr(instance, name), {}, of) for name, of in parameters.items()}

    return of_an_instance


def _server(stated: Mapping[str, Any], caller: Caller, ends: Ends | None = None) -> ToolServer:
    command, url = stated["mcp"]["command"], stated["mcp"]["url"]
    settings = caller.secrets.resolved(f"mcp {url or command}", stated["kwargs"])
    return ToolServer(command, url, settings, caller.secrets.scrubbed, ends)


def _at(location: str) -> Callable[..., Any]:
    """The function or class that a tool's location names. Raises RewardError where there is none."""
    place, _, name = location.rpartition(":")
    who = f"tool {location}"
    with importing(who):
        target = getattr(module_at(place, "tools"), name, None)
    if target is None or not callable(target):
        raise RewardError(f"{who}: {place} has no function {name!r}.")
    return target


def _methods(target: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A class's public methods, as an instance has them, in the order of their definition."""
    names = dict.fromkeys(name for base in reversed(target.__mro__) for name in vars(base) if name[0] != "_")
    for name in names:
        defined, method = inspect.getattr_static(target, name), getattr(target, name)
        if isinstance(defined, staticmethod | classmethod):
            yield name, method
        elif inspect.isfunction(defined):
            yield name, types.MethodType(defined, _NOBODY)


def _schema(who: str, function: Callable[..., Any], name: str, kwargs: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of a tool, without the arguments that the model does not give. Raises RewardError."""
    from transformers.utils.chat_template_utils import get_json_schema  # takes a second to import

    try:
        schema = get_json_schema(function)
    except Exception as error:  # noqa: BLE001  transformers has a class for each fault, and inspect has others
        raise RewardError(
            f"{who}: {shortened(str(error).rstrip('.!'), MOST_MESSAGE)}. Give it a type for each argument, and a "
            "docstring that says what it does and, under Args:, what each argument is."
        ) from None
    described = schema["function"]
    parameters = described["parameters"]
    described["name"] = name
    unknown = [key for key in kwargs if key not in parameters["properties"]]
    if unknown:
        raise RewardError(f"{who}: its kwargs give {unknown[0]!r}, which is none of its parameters.")
    signature = inspect.signature(function).parameters.values()
    unnamed = [str(each) for each in signature if each.kind in _UNNAMED]
    if unnamed:
        raise RewardError(
            f"{who}: the model gives arguments by name, but `{unnamed[0]}` takes none of a name. Change it."
        )
    of_user = {*kwargs, *(each.name for each in signature if each.kind is each.KEYWORD_ONLY)}
    for key in of_user:
        del parameters["properties"][key]
    parameters["required"] = [each for each in parameters.get("required", ()) if each not in of_user]
    return schema
