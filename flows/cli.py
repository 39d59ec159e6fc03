"""The command line: `prefect-rlhf COMMAND`. Each command's module is loaded when the command runs."""

import ast
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from cyclopts import App, CycloptsError
from rich.markup import escape

from flows.view.consoles import Console

app = App(
    name="prefect-rlhf",
    help="RLHF training of large language models as Prefect flows.",
    version=lambda: version("prefect-rlhf"),
    version_flags=["--version"],
)
config_app = App(name="config", help="Show and check run configurations.")
COMMANDS = {
    "run": "training",
    "demo": "training",
    "plan": "plans",
    "rehearse": "rehearsals",
    "doctor": "doctor",
    "profile": "profiles",
    "pause": "orders",
    "resume": "orders",
    "stop": "orders",
    "cancel": "orders",
    "ui": "folders",
    "export": "folders",
    "graph": "graphs",
}
CONFIG_COMMANDS = {"schema": "configs", "show": "configs", "validate": "configs"}
"""Command -> its module in flows/commands."""


def _about(name: str, module: str) -> str:
    """A command's docstring without its parameters, read from the source so that `--help` loads no module."""
    tree = ast.parse(Path(__file__).with_name("commands").joinpath(f"{module}.py").read_bytes())
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return (ast.get_docstring(function) or "").partition("\nParameters\n")[0].strip()


for group, commands in ((app, COMMANDS), (config_app, CONFIG_COMMANDS)):
    for name, module in commands.items():
        group.command(f"flows.commands.{module}:{name}", name=name, help=_about(name, module))
app.command(config_app)

USER_ERROR = 2  # exit status after a mistake of the user
OUR_PACKAGES = ("flows", "rlhf_tasks", "planner", "blocks", "deployments")
INTERRUPTED = 130  # 128 + SIGINT, the shells' convention


def main() -> None:
    """Entry point of the process."""
    # The terminal shows our own lines; Prefect's logs are in the UI. Workers inherit this.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    _refuse_shadowing()
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit status. A user's mistake is printed as one sentence.

    Only `ConfigError` and its subclasses are mistakes of the user. Any other error, such as a library's ValueError,
    is ours and keeps its traceback.
    """
    from rlhf_tasks.algorithms.configurations import ConfigError

    try:
        app(arguments, exit_on_error=False, result_action="return_value")
    except CycloptsError:  # its message is already printed
        return USER_ERROR
    except ConfigError as error:
        message = escape(str(error)).replace("\n", "\n       ")  # a line for each of several faults
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {message}", soft_wrap=True)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _refuse_shadowing() -> None:
    """Exit if a user's package hides one of ours: our import names are top-level, and the first on the path wins."""
    ours = Path(__file__).parents[1]
    for package in OUR_PACKAGES:
        found = find_spec(package)
        if found is None or found.origin is None or Path(found.origin).parents[1] != ours:
            theirs = "nowhere" if found is None or found.origin is None else Path(found.origin).parent
            message = f"{package} would be imported from {theirs}, which hides prefect-rlhf's own package in {ours}."
            print(f"error: {message} Rename that folder, or take it off PYTHONPATH.", file=sys.stderr)
            sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
