"""The command line: `prefect-rlhf COMMAND`. Each command's module is loaded when the command runs."""

import ast
import os
import select
import sys
from importlib.metadata import version
from pathlib import Path

from cyclopts import App, CycloptsError
from rich.markup import escape

from prefect_rlhf.flows.view.terminal import Console
from prefect_rlhf.rlhf_tasks.system.child_processes import direct_to_loopback

app = App(
    name="prefect-rlhf",
    help="RLHF training of large language models as Prefect flows.",
    version=lambda: version("prefect-rlhf"),
    version_flags=["--version"],
)
config_app = App(name="config", help="Show and check run configurations.")
runs_app = App(name="runs", help="List runs, and compare them.")
champion_app = App(name="champion", help="The model that a series has promoted: list them, roll back.")
COMMANDS = {
    "run": "runs",
    "demo": "runs",
    "plan": "plans",
    "rehearse": "rehearsals",
    "doctor": "configs",
    "profile": "plans",
    "pause": "runs",
    "resume": "runs",
    "stop": "runs",
    "cancel": "runs",
    "ui": "runs",
    "export": "runs",
    "report": "reports",
    "lineage": "lineage",
    "init": "init",
    "setup": "setup",
    "chat": "answers",
    "generate": "answers",
    "graph": "plans",
    "replay": "replays",
    "rows": "environments",
}
CONFIG_COMMANDS = {"schema": "configs", "show": "configs", "validate": "configs"}
RUNS_COMMANDS = {"list": "records:list_runs", "compare": "records:compare_runs"}
CHAMPION_COMMANDS = {"list": "champions:list_champions", "rollback": "champions:rollback"}
"""Command -> its module in flows/commands, and its function there if that has another name."""


def _about(name: str, module: str) -> str:
    """A command's docstring without its parameters, read from the source so that `--help` loads no module."""
    tree = ast.parse(Path(__file__).with_name("commands").joinpath(f"{module}.py").read_bytes())
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return (ast.get_docstring(function) or "").partition("\nParameters\n")[0].strip()


GROUPS = (
    (app, COMMANDS),
    (config_app, CONFIG_COMMANDS),
    (runs_app, RUNS_COMMANDS),
    (champion_app, CHAMPION_COMMANDS),
)
for group, commands in GROUPS:
    for name, place in commands.items():
        module, _, function = place.partition(":")
        function = function or name
        target = f"prefect_rlhf.flows.commands.{module}:{function}"
        group.command(target, name=name, help=_about(function, module))
    if group is not app:
        app.command(group)

USER_ERROR = 2  # exit status after a mistake of the user
INTERRUPTED = 130  # 128 + SIGINT, the shells' convention
UNREAD = 141  # 128 + SIGPIPE


def main() -> None:
    """Entry point of the process."""
    # PYTHONUTF8=0, or an old locale: paths and texts would not be read.
    if sys.getfilesystemencoding() != "utf-8":
        if os.environ.get("PYTHONUTF8") == "1":
            print(
                "error: Python was started without UTF-8 (-X utf8=0, -E or -I). Leave that out.",
                file=sys.stderr,
            )
            sys.exit(USER_ERROR)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONUTF8": "1"})
    os.environ.update(direct_to_loopback(os.environ))
    # The terminal shows our own lines; Prefect's logs are in the UI. Workers inherit this.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit status. A user's mistake is printed as one sentence.

    A user's mistake is a `ConfigError` or one of its subclasses, or an OSError, which names a path of the user's. Any
    other error, such as a library's ValueError, is ours and keeps its traceback.
    """
    from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
    from prefect_rlhf.rlhf_tasks.system.reading import refused_by_system

    try:
        app(arguments, exit_on_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError:  # its message is already printed
        return USER_ERROR
    except (ConfigError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return UNREAD
        said = refused_by_system(error) if isinstance(error, OSError) else str(error)
        message = escape(said).replace("\n", "\n       ")  # a line for each of several faults
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {message}", soft_wrap=True)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _is_unread() -> bool:
    """Whether the reader of our output has ended, as `| head` does. Then nothing more is written."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python writes what is left when it ends
    return gone


if __name__ == "__main__":
    main()
