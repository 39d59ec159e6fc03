"""Several runs one after another as one page: the stages of a pipeline."""

from collections.abc import Sequence

from prefect_rlhf.flows.view.pictures.curves import curve_panel, drawn_metrics
from prefect_rlhf.flows.view.pictures.svg import element, seconds
from prefect_rlhf.flows.view.report.contents import Contents
from prefect_rlhf.flows.view.report.document import document, header, paragraph, section, table, tiles
from prefect_rlhf.flows.view.report.page import beside, footer, key_figures, sample_card

MOST_SAMPLES = 2


def pipeline_page(name: str, stages: Sequence[Contents]) -> str:
    """The page of a pipeline's stages, in their order. Each has a page of its own in its folder."""
    parts = [
        ("stages", "Stages", table([_row(stage) for stage in stages])),
        *((f"stage-{number}", stage.run, _stage(stage)) for number, stage in enumerate(stages, 1)),
    ]
    total_s = sum(stage.summary.get("seconds", 0.0) for stage in stages)
    figures = [("stages", str(len(stages))), ("on the ranks' clocks", seconds(total_s))]
    head = header(name, f"A pipeline: {', '.join(stage.run for stage in stages)}.", parts)
    body = [head, tiles(figures), *(section(*part) for part in parts), footer(stages[0].versions)]
    return document(f"{name}: a pipeline", "".join(body))


def _row(stage: Contents) -> dict[str, str]:
    of = "" if stage.total is None else f" of {stage.total}"
    whole_s = stage.summary.get("seconds")
    return {
        "stage": stage.run,
        "type": stage.algorithm,
        "begins with": stage.model,
        "iterations": f"{stage.complete}{of}",
        "seconds": "" if whole_s is None else seconds(whole_s),
        "how it is": stage.ended,
    }


def _stage(stage: Contents) -> str:
    """A stage's figures, curves and last samples."""
    curves = {name: curve for name, curve in stage.curves.items() if len(curve.values)}
    panels = [curve_panel(name, [curves[name]]) for name in drawn_metrics(list(curves))]
    samples = [sample_card(row) for row in stage.samples[-1].rows[:MOST_SAMPLES]] if stage.samples else []
    more = f"More is in {stage.run}/report.html, beside this page."
    return "".join(
        [
            tiles(key_figures(stage)),
            beside(panels),
            element("div", *samples, class_="pairs") if samples else "",
            paragraph(more, class_="pale-text"),
        ]
    )
