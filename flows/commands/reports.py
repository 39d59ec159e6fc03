"""`report`: a run as a page, or as a trace of its ranks."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prefect_rlhf.flows.commands.options import refuse_folder
from prefect_rlhf.flows.run.reporting import REPORT, write_report, write_trace
from prefect_rlhf.flows.run.run_folder import refuse_unwritable
from prefect_rlhf.flows.view.terminal import tell
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError


def report(
    run: Path,
    /,
    *,
    html: Annotated[Path | None, Parameter("--html")] = None,
    trace: Annotated[Path | None, Parameter("--trace")] = None,
) -> None:
    """Write the report of a run, one HTML page that opens offline: curves, times, plan, samples, lineage.

    Parameters
    ----------
    run
        The run's folder; the run may be in progress. Or a pipeline's: one page of all its stages.
    html
        The page's file; default: report.html in the run's folder.
    trace
        Write instead a trace of the ranks' calls, transfers and waits in the newest iterations, which
        https://ui.perfetto.dev and chrome://tracing open.
    """
    if html is not None and trace is not None:
        raise ConfigError("--html and --trace are two files: run the command once for each.")
    file = trace or html or run / REPORT
    refuse_folder(file, REPORT)
    refuse_unwritable(file.parent, "the report's folder")
    if trace is not None:
        events = write_trace(run, trace)
        tell(f"{events} events: {trace}. Open it in https://ui.perfetto.dev, which keeps it in your browser.")
    else:
        tell(str(write_report(run, to=file)))
