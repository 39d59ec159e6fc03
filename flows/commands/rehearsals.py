"""`prefect-rlhf rehearse`: hours of a run on a cluster that need not be there, in virtual time."""

import json
import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.commands.numbers import check_range, whole_seed
from flows.commands.plans import check_writable, show_warnings
from flows.run.rehearsal import rehearsable, rehearsed
from flows.view.rehearsal_view import rehearsal_document, show_rehearsal
from flows.view.terminal import Console
from rlhf_tasks.algorithms.configurations import ConfigError, load_config
from rlhf_tasks.rehearsal.costs import Machines
from rlhf_tasks.rehearsal.faults import read_faults, scheduled

MOST_HOURS = 24.0 * 366
DISKS = (1e6, 1e13)  # bytes per second, from a slow network to more than any host has

console = Console()


def rehearse(
    *overrides: str,
    config: Path,
    hours: float = 24.0,
    faults: Path | None = None,
    disk_bytes_per_s: float = Machines.disk_bytes_per_s,
    noise: float = 0.05,
    seed: str | None = None,
    cluster: Path | None = None,
    profile: Path | None = None,
    every_iteration: Annotated[bool, Parameter(negative="")] = False,
    json_file: Annotated[Path | None, Parameter("--json")] = None,
) -> None:
    """Rehearse a run in virtual time: prefect-rlhf rehearse --config FILE [key.sub=value ...].

    The run's own controller, ledger and inboxes run a plan on simulated ranks, whose calls take what the planner
    prices. Needs no GPU, no cluster and no weights. Tells iterations, effective training time, where the time went,
    commits and their lag, memory, and deadlines that came near. Exit status 1 where the run gives up, or a deadline
    fires without a fault.

    Parameters
    ----------
    overrides
        `key.sub=value`, the value being YAML.
    config
        The run's configuration, a YAML file.
    hours
        Hours of the run to rehearse, if it has not reached its last iteration by then.
    faults
        A YAML file with faults, a rate of them, or both (docs/rehearsal.md).
    disk_bytes_per_s
        Bytes that a host reads and writes per second in the run's and the models' folders.
    noise
        Standard deviation of the logarithm of what calls take, against their price; 0: exactly their price.
    seed
        Seed of noise and drawn faults, a whole number from 0; default: the configuration's.
    cluster
        A YAML file with n_hosts, devices_per_host and device; default: as in the configuration.
    profile
        A file of `prefect-rlhf profile --out FILE`; default: the measured ones in <output_dir>/profiles/.
    every_iteration
        Rehearse every iteration, instead of counting quiet times from iterations like them. Takes minutes to hours.
    json_file
        File to write all figures to.
    """
    check_range("--hours", hours, 0.0, MOST_HOURS, "the hours are above 0 and at most a year's")
    check_range("--noise", noise, -math.ulp(0.0), 1.0, "the noise is from 0 to 1; 0.05 is about 5%")
    check_range("--disk-bytes-per-s", disk_bytes_per_s, *DISKS, "a disk moves 1e6 to 1e13 bytes per second")
    check_writable(json_file)
    used_seed = None if seed is None else whole_seed(seed)
    settings = load_config(config, overrides)
    given = None if faults is None else read_faults(faults)
    run = rehearsable(settings, cluster, profile)
    show_warnings(run.warnings)
    used_seed = settings.seed if used_seed is None else used_seed
    plan, machines = run.plan, Machines(disk_bytes_per_s=disk_bytes_per_s)
    strikes = scheduled(given, plan.n_devices, plan.devices_per_host, hours, used_seed, str(faults))
    with console.status("rehearsing ..."):
        found = rehearsed(
            run,
            hours=hours,
            machines=machines,
            noise=noise,
            seed=used_seed,
            faults=strikes,
            leaps=not every_iteration,
        )
    shown = (found, run.costs, machines, run.price, run.problem.model)
    _write(json_file, json.dumps(rehearsal_document(*shown), indent=2) + "\n")
    show_rehearsal(console, *shown)
    if not found.finished or found.false_faults:
        raise SystemExit(1)


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}).") from None
