"""Tools as the process that runs them loads them: functions of the user's, and their JSON schemas."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_rlhf.rlhf_tasks.user_code.child import Caller, importing
from prefect_rlhf.rlhf_tasks.user_code.errors import MOST_MESSAGE, RewardError, shortened
from prefect_rlhf.rlhf_tasks.user_code.forms import module_at


@dataclass(frozen=True)
class Tool:
    """A tool: a function, the arguments that the model does not give, and the JSON schema of the others."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    parameters: Mapping[str, Any]


class Schemas:
    """What a process answers that only looks at tools."""

    def __init__(self, begin: Mapping[str, Any], caller: Caller) -> None:
        self._schemas = [_schema(location, kwargs) for location, kwargs in begin["tools"]]

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The schemas of all tools."""
        return {"schemas": self._schemas}


def function_at(location: str) -> Callable[..., Any]:
    """The function that a tool's location names. Raises RewardError where there is none."""
    place, _, name = location.rpartition(":")
    who = f"tool {location}"
    with importing(who):
        function = getattr(module_at(place, "tools"), name, None)
    if function is None or not callable(function) or inspect.isclass(function):
        raise RewardError(f"{who}: {place} has no function {name!r}.")
    return function


def _schema(location: str, kwargs: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of a tool, without the arguments that the model does not give. Raises RewardError."""
    function, who = function_at(location), f"tool {location}"
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
    described["name"] = location.rpartition(":")[2]
    unknown = [key for key in kwargs if key not in parameters["properties"]]
    if unknown:
        raise RewardError(f"{who}: its kwargs give {unknown[0]!r}, which is none of its parameters.")
    signature = inspect.signature(function).parameters.values()
    of_user = {*kwargs, *(each.name for each in signature if each.kind is each.KEYWORD_ONLY)}
    for key in of_user:
        del parameters["properties"][key]
    parameters["required"] = [each for each in parameters.get("required", ()) if each not in of_user]
    return schema
