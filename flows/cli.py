"""The command line: `prefect-rlhf COMMAND`. Each command's module is loaded when the command runs."""

import os
import sys

from cyclopts import App
from rich.console import Console

app = App(
    name="prefect-rlhf",
    help="RLHF training of large language models as Prefect flows.",
    version_flags=["--version"],
)
config_app = App(name="config", help="Look at run configurations.")
app.command("flows.commands.graphs:graph")
app.command("flows.commands.training:run")
app.command("flows.commands.training:demo")
app.command("flows.commands.folders:ui")
app.command("flows.commands.folders:export")
config_app.command("flows.commands.configs:schema")
config_app.command("flows.commands.configs:show")
config_app.command("flows.commands.configs:validate")
app.command(config_app)


def main() -> None:
    """Entry point. A user's mistake ends with one sentence and status 2, Ctrl-C with status 130."""
    _refuse_shadowing()
    # The terminal shows our own lines; Prefect's logs are in the UI. Workers inherit this.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    try:
        app(exit_on_error=True)
    except ValueError as error:
        # Faults of a configuration, data set, plan or cluster are ValueErrors with one clear sentence.
        Console(stderr=True).print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def _refuse_shadowing() -> None:
    """Our import names are flat; a folder `flows/` of the user's that came first would be imported instead."""
    import planner

    ours = __file__.rsplit("/", 2)[0]
    theirs = (planner.__file__ or "").rsplit("/", 2)[0]
    if ours != theirs:
        message = f"error: {theirs}/planner hides prefect-rlhf's own package in {ours}. Rename that folder."
        print(message, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
