"""The model card, `README.md`, of the Hugging Face folder that a run writes: where the weights come from."""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import yaml

from flows.run.prepare import Prepared
from planner.report.text import plan_table

PACKAGES = ("prefect-rlhf", "torch", "transformers", "prefect", "distributed")
SECRET_WORDS = ("secret", "token", "password", "api_key", "apikey", "credential", "authorization")


def model_card(prepared: Prepared, run: str, role: str, metrics: Mapping[str, Any]) -> str:
    """The card as Markdown with Hugging Face's header: run, metrics, data, plan, versions, configuration.

    run, role  the run's name, and the role of the exported model
    metrics    of the iteration after which the model is exported; may be empty
    """
    config = prepared.config
    header = {"library_name": "transformers", "tags": ["prefect-rlhf", config.type.replace("_", "-")]}
    folder = config.roles()[role].folder
    if config.exports_adapters:
        header |= {"library_name": "peft", "base_model": folder}
    reached = "".join(f"| {name} | {json.dumps(value)} |\n" for name, value in metrics.items())
    versions = {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    parts = [
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n",
        f"# {run}\n",
        f"The {role} of a {config.type} run of prefect-rlhf over {prepared.iterations} iterations. "
        f"It started from `{folder}`.\n",
        f"## Metrics of iteration {metrics.get('iteration', -1) + 1}\n\n| metric | value |\n|---|---|\n{reached}"
        if reached
        else "",
        f"## Data\n\n{len(prepared.rows)} rows of `{config.data.name}`, SHA-256 of their content "
        f"`{prepared.rows.digest}`.\n",
        f"## Execution plan\n\n```text\n{plan_table(prepared.plans[-1].plan)}\n```\n",
        "## Versions\n\n" + "".join(f"- {name} {found}\n" for name, found in versions.items()),
        "## Configuration\n\n```yaml\n"
        f"{yaml.safe_dump(without_secrets(config.model_dump(mode='json')), sort_keys=False)}```\n",
    ]
    return "\n".join(part for part in parts if part)


def without_secrets(value: Any) -> Any:
    """The same document with `***` for values whose key suggests a secret, for headers, and for passwords in
    addresses."""
    if isinstance(value, Mapping):
        blotted = {
            key: "***" if item is not None and _is_secret(str(key), item) else without_secrets(item)
            for key, item in value.items()
        }
        headers = value.get("headers")
        if isinstance(headers, Mapping):  # whatever they are called; {env: VARIABLE} is no secret
            shown = {name: "***" if isinstance(item, str) else item for name, item in headers.items()}
            blotted["headers"] = shown
        return blotted
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, str) and "://" in value and "@" in value:
        scheme, _, rest = value.partition("://")
        return f"{scheme}://***@{rest.rpartition('@')[2]}"
    return value


def _is_secret(key: str, value: Any) -> bool:
    """Only texts are secrets: the number max_prompt_tokens also has the word `token` in its key."""
    return isinstance(value, str) and any(word in key.lower() for word in SECRET_WORDS)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"
