"""Several runs beside each other as one page."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from prefect_rlhf.flows.view.pictures.colours import SERIES
from prefect_rlhf.flows.view.pictures.curves import curve_panel, drawn_metrics
from prefect_rlhf.flows.view.pictures.svg import element, shown_text
from prefect_rlhf.flows.view.report.contents import Contents
from prefect_rlhf.flows.view.report.document import document, folded, header, section, table
from prefect_rlhf.flows.view.report.page import MOST_CURVES, TIMES, beside, footer, key_figures, sample_card

MOST_RUNS = len(SERIES)
"""Runs that have a colour each."""
MOST_SAMPLES = 4


def comparison_page(runs: Sequence[Contents], tables: Mapping[str, Mapping[str, Sequence[Any]]]) -> str:
    """The page of 2 to MOST_RUNS runs.

    tables  heading -> what the rows are called -> a value for each run
    """
    names = [run.run for run in runs]
    parts = [
        ("curves", "Curves", _curves(runs)),
        *((f"table-{n}", heading, _beside(names, rows)) for n, (heading, rows) in enumerate(tables.items())),
        ("samples", "Samples of the last iteration", _samples(runs)),
    ]
    figures = [dict(key_figures(run)) for run in runs]
    whats = dict.fromkeys(what for of_run in figures for what in of_run)
    first = {what: [of_run.get(what) for of_run in figures] for what in whats}
    head = header(f"{len(runs)} runs compared", ", ".join(names), [part for part in parts if part[2]])
    sections = [section(*part) for part in parts]
    body = [head, _switches(runs), _beside(names, first), *sections, footer(runs[0].versions)]
    return document(f"Compared: {', '.join(names)}", "".join(body))


def _beside(names: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> str:
    """A table with a column for each run, which has a value in each row."""
    return table(
        [
            {"": what} | {f"{n + 1}: {name}": values[n] for n, name in enumerate(names)}
            for what, values in rows.items()
        ]
    )


def _switches(runs: Sequence[Contents]) -> str:
    """A box for each run, with its colour: its curves are shown or hidden."""
    boxes = [
        element(
            "label",
            f'<input type="checkbox" checked data-run="{number}"> ',
            element("span", "", class_=f"key f{number}"),
            shown_text(f"{run.run} ({run.algorithm} of {run.model})"),
        )
        for number, run in enumerate(runs)
    ]
    return element("div", *boxes, class_="runs")


def _curves(runs: Sequence[Contents]) -> str:
    """A panel for each metric that a run has; a run keeps its colour where another one lacks the metric."""
    names = list(
        dict.fromkeys(name for run in runs for name, curve in run.curves.items() if len(curve.values))
    )
    first = drawn_metrics(names)
    rest = [name for name in names if name not in first and not name.startswith(TIMES)][:MOST_CURVES]

    def panels(shown: Sequence[str]) -> str:
        drawn = []
        for name in shown:
            curves = [run.curves.get(name) for run in runs]
            drawn.append(
                curve_panel(
                    name,
                    [
                        replace(curve, run=run.run, colour=number)
                        for number, (run, curve) in enumerate(zip(runs, curves, strict=True))
                        if curve is not None and len(curve.values)
                    ],
                )
            )
        return beside(drawn)

    return panels(first) + folded(f"{len(rest)} other metrics", panels(rest))


def _samples(runs: Sequence[Contents]) -> str:
    columns = [
        [sample_card(row) for row in run.samples[-1].rows[:MOST_SAMPLES]] if run.samples else []
        for run in runs
    ]
    if not any(columns):
        return ""
    heads = [element("h3", shown_text(run.run)) for run in runs]
    cells = [cell or element("div", "") for row in zip_longest(*columns, fillvalue="") for cell in row]
    return element("div", *heads, *cells, class_=f"pairs of-{len(runs)}")
