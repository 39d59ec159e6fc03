"""Flow `rlhf-series`: trains on the rows that are new, and promotes the model where it is better than the champion.

A run of a series takes the rows that no champion has learned from, trains, lets the new model and the champion
answer the same held-out rows, and decides. It goes through its steps in a folder of its own, so that one that was
interrupted continues and comes to the same decision:

    begin_run   the new rows and the present champion are written down; nothing new: the flow ends
    stages      a pipeline: train, candidate, champion (flows/pipeline.py)
    compared    the interval of the difference of their scores; with `approval: required` a person's word
    decide      decision.json, the log of champions, the alias
"""

import asyncio
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from prefect import Flow, flow
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run

from prefect_rlhf.flows.cluster.forks import refuse_unguarded_script
from prefect_rlhf.flows.cluster.server import prefect_server
from prefect_rlhf.flows.cluster.shutdown import ending_in_time
from prefect_rlhf.flows.pipeline import PipelineStages
from prefect_rlhf.flows.recurring import approval, champions
from prefect_rlhf.flows.recurring.beginning import NOTHING_NEW, SeriesRun, begin_run, open_series
from prefect_rlhf.flows.recurring.comparison import compared
from prefect_rlhf.flows.recurring.new_rows import first_place
from prefect_rlhf.flows.run.orders import cancelled_by_signals
from prefect_rlhf.flows.run.run_folder import taken
from prefect_rlhf.flows.view.artifacts import show_result
from prefect_rlhf.flows.view.prefect_api import PrefectApi, send_event
from prefect_rlhf.rlhf_tasks.algorithms.configurations import RunConfig
from prefect_rlhf.rlhf_tasks.algorithms.series import CANDIDATE, CHAMPION, SeriesConfig, series_folder
from prefect_rlhf.rlhf_tasks.config.sampling import OnePass
from prefect_rlhf.rlhf_tasks.data.token_file import ROWS, TokenFile
from prefect_rlhf.rlhf_tasks.user_code.rewards import read_samples

EVENT = "prefect-rlhf.series."  # followed by `promoted` or `kept`


def _run_name() -> str:
    return f"series/{flow_run.parameters['config'].name}"


@flow(name="rlhf-series", flow_run_name=_run_name, persist_result=False)
async def rlhf_series(config: SeriesConfig) -> dict[str, Any]:
    """Fine-tune on the rows added since the last champion, and promote the model where it is better.

    Returns the decision, which is also in decision.json of the run's folder: `promoted`, `kept`, `waiting` (another
    flow run asks a person) or `nothing new`, with the reason and the figures.

    Args:
        config: The series' configuration, as in a YAML file.
    """
    refuse_unguarded_script()
    async with cancelled_by_signals(lambda: "between two stages"):
        folder = open_series(config)
        with taken(folder):
            begun = await asyncio.to_thread(begin_run, config, flow_run.id)
            return await carry_out_series(config, begun)


async def series_as_flow(config: SeriesConfig, begun: SeriesRun | None) -> dict[str, Any]:
    """Carry out a run that the caller has begun, whose series' folder it has taken, in a flow run of its own."""

    async def run(config: SeriesConfig) -> dict[str, Any]:
        async with cancelled_by_signals(lambda: "between two stages"):
            return await carry_out_series(config, begun)

    return await Flow(run, rlhf_series.name, flow_run_name=_run_name, persist_result=False)(config)


async def carry_out_series(config: SeriesConfig, run: SeriesRun | None) -> dict[str, Any]:
    """Train, evaluate and decide a run that is begun. Returns the decision.

    Called inside a flow, by who has taken the series' folder.
    """
    folder = series_folder(config)
    if run is None:
        waiting = champions.waiting_for(folder)
        decision, reason = ("waiting", waiting) if waiting else ("nothing new", NOTHING_NEW)
        get_run_logger().info(reason)
        return {"decision": decision, "reason": reason, "champion": champions.champion_of(folder)}
    for warning in run.warnings:
        get_run_logger().warning(warning)
    with ending_in_time(asyncio.current_task()), prefect_server(folder):
        with PipelineStages(run.stages, run.checked) as stages:  # its devices are free while a person decides
            for name in run.stages:
                await stages.run(name)
        decision = await _decided(run)
        await asyncio.to_thread(champions.decide, folder, run.name, decision)
        await _show(run, decision)
    return decision


async def _decided(run: SeriesRun) -> dict[str, Any]:
    """The decision of a run whose stages are finished."""
    samples = {name: judged_samples(run.stages[name]) for name in (CANDIDATE, CHAMPION) if name in run.stages}
    scores = {name: _scores(judged) for name, judged in samples.items()}
    decision: dict[str, Any] = {
        "run": run.name,
        "rows": run.begun["rows"],
        "compared_with": run.begun["champion"],
    }
    if CHAMPION in run.stages:
        comparison = compared(scores[CANDIDATE], scores[CHAMPION], run.series.confidence, run.series.margin)
        decision |= {"figures": comparison._asdict()}
        promotes, reason = comparison.is_better, comparison.reason
    else:
        mean = fmean(scores[CANDIDATE])
        decision |= {"figures": {"rows": len(scores[CANDIDATE]), "candidate": mean}}
        promotes, reason = True, f"it is the first: mean score {mean:.4g} on {len(scores[CANDIDATE])} rows."
    if promotes and run.series.approval == "required":
        question = _question(run, reason, decision["figures"], samples)
        answer = await _answer(run, question, reason, decision)
        decision |= {"approval": answer.comment}
        promotes, reason = answer.promotes, f"{answer.comment}; {reason}"
    return _decision(run, promotes, reason, decision)


def _decision(run: SeriesRun, promotes: bool, reason: str, more: dict[str, Any]) -> dict[str, Any]:
    change = champions.PROMOTED if promotes else champions.KEPT
    champion = run.name if promotes else run.begun["champion"]
    return {"decision": change, "reason": reason, "champion": champion, **more}


async def _answer(run: SeriesRun, question: str, reason: str, decision: dict[str, Any]) -> approval.Answer:
    """What a person answers. If this process does not live to see that nobody does, the series' next run decides."""
    timeout_s = run.series.approval_timeout_s
    nobody = approval.unanswered(timeout_s)
    kept = _decision(run, False, f"{nobody}; {reason}", {**decision, "approval": nobody})
    suspended = None if deployment.id is None else flow_run.id
    left_s = champions.ask_until(run.folder, run.name, timeout_s, kept, suspended)
    return await approval.ask(question, ceil(left_s), f"{run.series.name}-{run.name}")


def judged_samples(config: RunConfig) -> list[dict[str, Any]]:
    """The judged answers of a finished evaluation, in the order of the rows; not those that fill its last batch."""
    assert isinstance(config, OnePass)
    folder = Path(config.output_dir, str(config.name))
    n_samples = config.samples(len(TokenFile.open(folder / ROWS)))
    return [
        {**sample, "row": sample["id"] // config.num_generations}
        for sample in read_samples(folder, n_samples)
    ]


def _scores(samples: Sequence[dict[str, Any]]) -> list[float]:
    """The mean score of the answers to each row."""
    of_rows: dict[int, list[float]] = {}
    for sample in samples:
        of_rows.setdefault(sample["row"], []).append(sample["score"])
    return [fmean(of_rows[row]) for row in sorted(of_rows)]


def _question(
    run: SeriesRun, reason: str, figures: dict[str, Any], samples: dict[str, list[dict[str, Any]]]
) -> str:
    facts = {
        "rows learned": run.begun["rows"],
        "first of them": first_place(run.place),
        "new model": champions.model_of(run.folder, run.name),
        "compared with": "nothing: it is the first"
        if run.begun["champion"] is None
        else champions.model_of(run.folder, run.begun["champion"]),
    }
    shown = [
        {"figure": name, "value": value}
        for name, value in figures.items()
        if name not in ("margin", "confidence")
    ]
    pairs = approval.side_by_side(samples[CANDIDATE], samples.get(CHAMPION, []))
    return approval.question(f"Promote run {run.name} of {run.series.name}? {reason}", facts, shown, pairs)


async def _show(run: SeriesRun, decision: dict[str, Any]) -> None:
    """Show the decision in Prefect, and send its event."""
    api = PrefectApi(run.series.name)
    heading = f"{run.name} is {'promoted' if decision['decision'] == champions.PROMOTED else 'not promoted'}"
    rows = [{"figure": name, "value": value} for name, value in decision["figures"].items()]
    await api.show(lambda: show_result(f"{heading}: {decision['reason']}", rows))
    payload = {**decision, "model": str(champions.model_of(run.folder, run.name))}
    await api.show(
        lambda: send_event(
            f"{EVENT}{decision['decision']}", f"prefect-rlhf.series.{run.series.name}", payload
        )
    )
