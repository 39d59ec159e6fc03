"""`prefect-rlhf profile`: measure the models of a configuration on its cluster."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from flows.planning import hardware_of, measured_folders, problem_of
from rlhf_tasks.config import load_config

console = Console()


def profile(
    *overrides: str,
    config: Path,
    out: Annotated[Path | None, Parameter("--out")] = None,
) -> None:
    """Time layers and collectives on the run's cluster: prefect-rlhf profile --config FILE [key.sub=value ...].

    Takes minutes. The profiles go to <output_dir>/profiles/; plans of runs with the same models, devices and cluster
    use them from there.

    Parameters
    ----------
    overrides
        `key.sub=value`, the value being YAML.
    config
        The run's configuration, a YAML file.
    out
        A JSON file to write the profiles to besides.
    """
    settings = load_config(config, overrides)
    problem_of(settings, hardware_of(settings))
    measured_folders(settings)
    # Prefect takes seconds to import: a faulty configuration was refused before that.
    from flows.session import profile_here

    profile_here(settings, out)
