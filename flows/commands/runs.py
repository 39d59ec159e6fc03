"""Commands of a run: `run` and `demo` begin or continue one; `pause`, `resume`, `stop` and `cancel` give it an order;
`ui` and `export` show what it has written.
"""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter
from pydantic import ValidationError

from prefect_rlhf.flows.commands.options import show_warnings, whole_seed
from prefect_rlhf.flows.demo import DATA, refuse_without_task
from prefect_rlhf.flows.pushes import PushError, check_push, push_model
from prefect_rlhf.flows.recurring import champions
from prefect_rlhf.flows.recurring.beginning import NOTHING_NEW, begin_run, open_series
from prefect_rlhf.flows.rewards import refuse_blocks_without_server
from prefect_rlhf.flows.run import run_identity
from prefect_rlhf.flows.run.downloads import fetched
from prefect_rlhf.flows.run.origins import leave_origin
from prefect_rlhf.flows.run.run_folder import (
    CONFIG,
    existing_run_folder,
    leave_order,
    open_run,
    refuse_foreign,
    refuse_unwritable,
    refuse_used_name,
    run_folder_of,
    taken,
)
from prefect_rlhf.flows.run.run_identity import check_stages
from prefect_rlhf.flows.run.summary import card_of_commit
from prefect_rlhf.flows.view.terminal import phase, tell
from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    PIPELINE,
    ConfigError,
    PipelineConfig,
    RunConfig,
    folder_of,
    load_config,
    load_pipeline,
    override,
    stages_of,
)
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm as registered
from prefect_rlhf.rlhf_tasks.algorithms.series import SERIES, SeriesConfig, load_series, series_folder
from prefect_rlhf.rlhf_tasks.checkpoint.commits import commit_to_export
from prefect_rlhf.rlhf_tasks.config.files import faults_of
from prefect_rlhf.rlhf_tasks.config.models import HubPush


def run(
    algorithm: str,
    /,
    *overrides: str,
    config: Annotated[Path | None, Parameter("--config")] = None,
    resume: Annotated[Path | None, Parameter("--resume")] = None,
    accept_changes: Annotated[bool, Parameter("--accept-changes", negative="")] = False,
) -> None:
    """Run a training: prefect-rlhf run ppo --config FILE [key.sub=value ...].

    Parameters
    ----------
    algorithm
        ppo, grpo, dpo, sft, reward-model, rollout, evaluate, or another algorithm (docs/algorithms.md); or
        pipeline, whose stages are such runs, or series, which trains on new rows and promotes what is better. The
        same command continues what was interrupted.
    overrides
        `key.sub=value`, the value being YAML. With --resume only ordinary changes: `total_iterations`, learning
        rates, when to evaluate, and what no result depends on; all others need --accept-changes.
    config
        The run's configuration, a YAML file.
    resume
        A run folder: resume that run from its last commit.
    accept_changes
        With --resume: resume although configuration, data, models or journals have changed since the last commit;
        the differences are written to accepted.jsonl in the run folder.
    """
    if algorithm in (PIPELINE, SERIES):
        if config is None or resume is not None or accept_changes:
            raise ConfigError(
                f"A {algorithm} takes --config FILE and nothing else: the same command continues it where it ended."
            )
        if algorithm == SERIES:
            _run_series(load_series(config, overrides), config)
        else:
            _run_pipeline(load_pipeline(config, overrides), config)
        return
    if (config is None) == (resume is None):
        raise ConfigError("Give either --config FILE for a new run or --resume FOLDER to resume one.")
    if resume is not None:
        folder, settings = existing_run_folder(resume)
        refuse_foreign(folder)
        keys = {change.partition("=")[0].strip(): change for change in overrides}
        foreign = [change for key, change in keys.items() if not run_identity.may_be_stated(key)]
        if foreign and not accept_changes:
            raise ConfigError(
                f"--resume keeps the configuration of {resume}, but {' '.join(foreign)} would change it. Leave that "
                "out, add --accept-changes, or start a new run. Ordinary changes (total_iterations, learning rates, "
                "evaluation.every) need no --accept-changes."
            )
        settings = override(settings, overrides)
    else:
        assert config is not None
        folder, settings = open_run(load_config(config, overrides))
    if folder is None:
        refuse_used_name(settings)
    # Taken from the first look to the end: of two that resume a run at once, one continues.
    with taken(folder) if folder is not None else nullcontext():
        stated = [change.partition("=")[0].strip() for change in overrides]
        _run_in(algorithm, settings, config, folder, stated, accept_changes)


def _run_in(
    algorithm: str,
    settings: RunConfig,
    config: Path | None,
    folder: Path | None,
    stated: Sequence[str],
    accept_changes: bool,
) -> None:
    """Check a run's configuration, then run it.

    folder  of a run that is resumed, which is taken
    stated  keys that the command line gives
    """
    _refuse_other_type(algorithm, settings.type, config, folder)
    if folder is None and accept_changes:
        raise ConfigError("--accept-changes is only for a run that is resumed: give --resume FOLDER, too.")
    resumed = folder is not None
    prepared = run_identity.prepare_run(settings, folder, show_warnings, resumed, accept_changes, stated)
    # Prefect takes seconds to import, so a faulty configuration is refused before that. The run folder is made after
    # it, when Ctrl-C already says how to resume.
    with phase("Prefect"):
        from prefect_rlhf.flows.cluster.server import refuse_dead_server
        from prefect_rlhf.flows.commands.local_run import run_here

    refuse_dead_server()
    with run_folder_of(settings, folder) as folder, nullcontext() if resumed else taken(folder):
        run_here(folder, prepared)


def _refuse_other_type(named: str, kind: str, file: Path | None, folder: Path | None) -> None:
    """Raises ConfigError where the command names another algorithm than the file or the run that is resumed."""
    wanted = named.replace("-", "_")
    if wanted == kind:
        return
    registered(wanted)  # an unknown name is the likelier mistake
    right = f"prefect-rlhf run {kind.replace('_', '-')}"
    raise ConfigError(
        f"{folder or file} is of type {kind!r}, not {wanted!r}. "
        + (f"Use `{right} --resume`." if folder else f"Use `{right}`, or set type: {wanted} in the file.")
    )


def _run_pipeline(settings: PipelineConfig, file: Path) -> None:
    """Check all stages, then run those that are not finished."""
    configs = stages_of(settings)
    refuse_unwritable(folder_of(settings), "output_dir")
    with phase("data and models of all stages"):
        checked = check_stages(configs)
    show_warnings(checked.warnings)
    with phase("Prefect"):
        from prefect_rlhf.flows.cluster.server import refuse_dead_server
        from prefect_rlhf.flows.commands.local_run import pipeline_here
    for stage in configs.values():
        refuse_blocks_without_server(stage)
    refuse_dead_server()
    pipeline_here(settings, file, checked)


def _run_series(settings: SeriesConfig, file: Path) -> None:
    """Begin or continue a series' next run; end well where no row is new."""
    with taken(open_series(settings)):
        with phase("new rows, data and models"):
            begun = begin_run(settings)
        if begun is None:
            tell(champions.waiting_for(series_folder(settings)) or NOTHING_NEW)
            return
        show_warnings(begun.warnings)
        with phase("Prefect"):
            from prefect_rlhf.flows.cluster.server import refuse_dead_server
            from prefect_rlhf.flows.commands.local_run import series_here
        for stage in begun.stages.values():
            refuse_blocks_without_server(stage)
        refuse_dead_server()
        series_here(begun, file)


def demo(
    *,
    folder: Path = Path("runs/demo"),
    seed: str = "0",
) -> None:
    """Train a tiny model on 4 CPU ranks by SFT, reward modelling and PPO, shown in the Prefect UI.

    Parameters
    ----------
    folder
        Folder of all results; an interrupted demo in it is resumed.
    seed
        Seed of data, weights and sampling; another seed needs another folder.
    """
    number = whole_seed(seed)
    refuse_without_task(folder / DATA)
    refuse_unwritable(folder, "--folder")
    with phase("Prefect"):
        from prefect_rlhf.flows.commands.local_run import demo_here

    demo_here(folder, number)


TAKEN_S = 60.0  # the run's process looks twice a second
LOOK_EVERY_S = 0.1


def ui(run: Path, /) -> None:
    """Open the Prefect UI of a finished run, until Ctrl-C.

    Parameters
    ----------
    run
        The run's folder.
    """
    if not (run / "prefect").is_dir() and not (run / CONFIG).is_file():
        raise ConfigError(f"{run} is not the folder of a run. Name the folder of a run or of a demo.")
    if not (run / "prefect").is_dir():
        raise ConfigError(f"{run} has no Prefect server of its own: the run reported to PREFECT_API_URL.")
    refuse_foreign(run)
    from prefect_rlhf.flows.cluster.server import own_server  # Prefect takes seconds to import

    with own_server(run) as server:
        tell(f"{server.ui_line}   (Ctrl-C ends it)")
        while True:
            time.sleep(3600)


def export(
    run: Path,
    folder: Path | None = None,
    /,
    *,
    role: Annotated[str | None, Parameter("--role")] = None,
    merged: Annotated[bool, Parameter("--merged", negative="")] = False,
    push: Annotated[str | None, Parameter("--push")] = None,
    public: Annotated[bool, Parameter("--public", negative="")] = False,
) -> None:
    """Write a trained model of a run as a Hugging Face folder, or put it on the Hub. It is the model of the last
    commit or, with evaluation.keep_best, of the best one. For a run with `lora` it is the adapter.

    Parameters
    ----------
    run
        The run's folder.
    folder
        The folder to write; it must not exist yet. May be left out with --push.
    role
        A trained role; default: the only one, or the actor.
    merged
        Write the whole model with the adapter merged in.
    push
        ORG/NAME: a repository on the Hub that gets the model, with its card. A new one is private.
    public
        With --push: the repository may be public, and a new one is.
    """
    run_folder, config = existing_run_folder(run)
    stated, (config, _) = config, fetched(config, run_folder)
    target = _target(push, public)
    if folder is None and target is None:
        raise ConfigError("Name the FOLDER to write, or a repository: --push ORG/NAME.")
    if folder is not None and os.path.lexists(folder):  # a link that leads nowhere, too
        raise ConfigError(f"{folder} already exists. Remove it or name another folder.")
    refuse_unwritable(folder or run_folder, "FOLDER")
    if target is not None:
        check_push(target)
    commit, refused = commit_to_export(run_folder, config)
    for error in refused:
        tell(f"refused: {error}")
    if commit is None:
        raise ConfigError(f"{run} has no commit that can be used.")
    from prefect_rlhf.rlhf_tasks.rank.export import export_commit  # torch takes seconds to import

    chosen = role or ("actor" if "actor" in commit.manifest.roles else next(iter(commit.manifest.roles)))
    with nullcontext(folder) if folder is not None else TemporaryDirectory(dir=run_folder) as place:
        written = folder or Path(place, "model")
        export_commit(commit.folder, config, chosen, written, merged or None)
        leave_origin(run_folder, commit, written)
        if folder is not None:
            tell(f"{chosen} after {commit.step} iterations: {folder}")
        if target is not None:
            card = card_of_commit(config, stated, run_folder, chosen, commit.step, merged)
            (written / "README.md").write_text(card, encoding="utf-8")
            try:
                url = push_model(written, target, f"{run_folder.name} after {commit.step} iterations")
            except PushError as error:
                raise ConfigError(f"the model was not put on the Hub: {error}") from None
            tell(f"{chosen} after {commit.step} iterations: {url}")


def _target(push: str | None, public: bool) -> HubPush | None:
    if push is None and public:
        raise ConfigError("--public is for --push ORG/NAME. Leave it out.")
    if push is None:
        return None
    try:
        return HubPush(repo=push, private=not public)
    except ValidationError as error:
        raise ConfigError(f"--push: {faults_of(error)}") from None


def pause(run: Path, /, *, release: Annotated[bool, Parameter("--release", negative=())] = False) -> None:
    """Pause a run at its next commit.

    Parameters
    ----------
    run
        The run's folder.
    release
        Also release the devices: the ranks end, and new ones load the commit on resume. Default: the ranks keep them.
    """
    devices = "released" if release else "kept"
    _order(
        run,
        "release" if release else "pause",
        f"pauses when the iterations in flight are committed; its devices are {devices}. "
        f"To continue: prefect-rlhf resume {run}",
    )


def resume(run: Path, /) -> None:
    """Resume a run that is paused.

    Parameters
    ----------
    run
        The run's folder.
    """
    _order(run, "resume", "continues")


def stop(run: Path, /) -> None:
    """End a run at its next commit as if that were its last iteration, with model and summary.

    Parameters
    ----------
    run
        The run's folder.
    """
    _order(run, "stop", "ends when the iterations in flight are committed, with its model and summary")


def cancel(run: Path, /) -> None:
    """End a run at its next commit, without model or summary.

    Parameters
    ----------
    run
        The run's folder.
    """
    _order(run, "cancel", "ends when the iterations in flight are committed")


def _order(run: Path, command: str, what: str) -> None:
    """Give an order to the run's process, and print what it does. Raises ConfigError when the process does not take
    it."""
    folder, _ = existing_run_folder(run)
    order = leave_order(folder, command)
    deadline = time.monotonic() + TAKEN_S
    while order.exists():
        if time.monotonic() > deadline:
            order.unlink(missing_ok=True)
            raise ConfigError(
                f"the process of the run in {run} has not taken the order within {TAKEN_S:g} s: it is ending, or it "
                "hangs. End it with Ctrl-C."
            )
        time.sleep(LOOK_EVERY_S)
    tell(f"{folder.name} {what}")
