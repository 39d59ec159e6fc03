"""`prefect-rlhf profile`: profiles of a configuration's models, measured on its cluster or computed."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.commands.plans import check_writable, show_warnings
from flows.run.planning import computed_profiles, hardware_of, measured_folders, only_device, problem_of
from flows.run.ranks import decided
from flows.run.run_folder import refuse_unwritable
from flows.view.terminal import Console
from planner.pricing.profile_cache import write_profiles
from rlhf_tasks.algorithms.configurations import RunConfig, load_config

COMPUTED = "computed-profiles.json"  # in the output folder, outside its folder of measured profiles

console = Console()


def profile(
    *overrides: str,
    config: Path,
    analytic: Annotated[bool, Parameter(negative="")] = False,
    out: Annotated[Path | None, Parameter("--out")] = None,
) -> None:
    """Time layers and collectives on the run's cluster: prefect-rlhf profile --config FILE [key.sub=value ...].

    Takes minutes. Writes the profiles to <output_dir>/profiles/, from where plans for the same models, devices and
    cluster use them. Of CPU ranks on this machine all numbers are measured that a run may have, fewer with more
    threads each; the run then takes the fastest.

    With --analytic nothing is measured: times of the same layers and collectives are computed from the device's
    figures and written in the same format. That takes a second, needs no cluster, GPU or weights, and works for
    inline models too. A plan uses computed profiles only where plan --profile FILE names them, and says so.

    Parameters
    ----------
    overrides
        `key.sub=value`, the value being YAML.
    config
        The run's configuration, a YAML file.
    analytic
        Compute the profiles from the figures of planning.device, a preset or a file.
    out
        A JSON file to which the profiles are also written. Computed ones are written only there; default:
        <output_dir>/computed-profiles.json.
    """
    if out is not None:
        check_writable(out)
    settings = load_config(config, overrides)
    refuse_unwritable(Path(settings.output_dir), "output_dir")
    if analytic:
        _compute(decided(settings), out)
        return
    hardware = hardware_of(decided(settings))
    only_device(hardware)
    show_warnings(problem_of(decided(settings), hardware).warnings)
    measured_folders(settings)
    # Prefect takes seconds to import, so a faulty configuration is refused before that.
    from flows.commands.local_run import profile_here

    profile_here(settings, out)


def _compute(settings: RunConfig, out: Path | None) -> None:
    """Write computed profiles, and print how to use them."""
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
