"""`prefect-rlhf profile`: a profile of a configuration's models, measured on its cluster or computed."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from flows.commands.plans import check_writable, show_warnings
from flows.run.planning import computed_profiles, hardware_of, measured_folders, only_device, problem_of
from planner.pricing.profile_cache import write_profiles
from rlhf_tasks.algorithms.configurations import RunConfig, load_config

COMPUTED = "computed-profiles.json"  # in the output folder, where no plan looks for measured ones

console = Console()


def profile(
    *overrides: str,
    config: Path,
    analytic: Annotated[bool, Parameter(negative="")] = False,
    out: Annotated[Path | None, Parameter("--out")] = None,
) -> None:
    """Time layers and collectives on the run's cluster: prefect-rlhf profile --config FILE [key.sub=value ...].

    Takes minutes. The profiles go to <output_dir>/profiles/; plans of runs with the same models, devices and cluster
    use them from there.

    With --analytic nothing is measured: what the device's figures say of the same layers and collectives is written
    in the same format, in a second, without cluster, GPU and weights, of inline models too. A plan goes by it only
    where plan --profile FILE names it, and says so.

    Parameters
    ----------
    overrides
        `key.sub=value`, the value being YAML.
    config
        The run's configuration, a YAML file.
    analytic
        Compute the profiles from the figures of planning.device, a preset or a file.
    out
        A JSON file to write the profiles to besides; computed ones go there alone, or to
        <output_dir>/computed-profiles.json.
    """
    if out is not None:
        check_writable(out)
    settings = load_config(config, overrides)
    if analytic:
        _compute(settings, out)
        return
    hardware = hardware_of(settings)
    only_device(hardware)
    show_warnings(problem_of(settings, hardware).warnings)
    measured_folders(settings)
    # Prefect takes seconds to import: a faulty configuration was refused before that.
    from flows.commands.local_run import profile_here

    profile_here(settings, out)


def _compute(settings: RunConfig, out: Path | None) -> None:
    """Write what the device's figures say, and what to do with it."""
    show_warnings(hardware_of(settings).warnings)
    profiles = computed_profiles(settings)
    file = out or Path(settings.output_dir) / COMPUTED
    file.parent.mkdir(parents=True, exist_ok=True)
    write_profiles(profiles, file)
    console.print(
        f"{profiles[0].title}: {file}. To plan by it: prefect-rlhf plan --profile {file}",
        highlight=False,
        soft_wrap=True,
    )
