"""A configuration as readers of a model's card or a tracker see it: without the arguments of a user's code."""

from typing import Any

from rlhf_tasks.config.base import RunConfig

ARGUMENTS = ("kwargs", "headers")
"""Keys whose values a user's code or service gets. Any value may be a secret, whatever its name."""


def public_document(config: RunConfig) -> dict[str, Any]:
    """The configuration, JSON-able, without arguments of a user's code, and without logins and queries of URLs."""
    return _public(config.model_dump(mode="json"))


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items() if key not in ARGUMENTS}
    if isinstance(value, list):
        return [_public(item) for item in value]
    if isinstance(value, str) and "://" in value:
        scheme, _, rest = value.partition("://")
        address, asked, _ = rest.partition("?")
        place, slash, path = address.partition("/")
        _, at, host = place.rpartition("@")
        return f"{scheme}://{'***@' if at else ''}{host}{slash}{path}{'?***' if asked else ''}"
    return value
