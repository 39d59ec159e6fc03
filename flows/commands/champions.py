"""Commands of a series' champion: `champion list` and `champion rollback`."""

from pathlib import Path

from prefect_rlhf.flows.recurring import champions
from prefect_rlhf.flows.run.run_folder import refuse_foreign
from prefect_rlhf.flows.view.terminal import tell


def list_champions(series: Path, /) -> None:
    """List what was promoted, kept and rolled back in a series, and name the champion.

    Parameters
    ----------
    series
        The series' folder.
    """
    champions.refuse_no_series(series)
    for run in champions.runs_of(series):
        decision = champions.decision_of(series, run)
        tell(
            f"{run}  {'not decided yet' if decision is None else decision['decision']}"
            f"{'' if decision is None else ': ' + decision['reason']}"
        )
    for change in champions.changes_of(series):
        if change["change"] == champions.ROLLED_BACK:
            tell(f"{change['time']}  {change['run']} was rolled back, {change['why']}")
    champion = champions.champion_of(series)
    tell(
        "no champion yet"
        if champion is None
        else f"champion: {champion}, {champions.model_of(series, champion)}"
    )


def rollback(series: Path, /) -> None:
    """Make the champion before the present one the champion again.

    Parameters
    ----------
    series
        The series' folder.
    """
    champions.refuse_no_series(series)
    refuse_foreign(series)
    former, earlier = champions.roll_back(series)
    tell(f"the champion is {earlier} again, in place of {former}: {champions.model_of(series, earlier)}")
