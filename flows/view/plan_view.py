"""Shows a priced plan in the terminal: calls, source of figures, timeline, rejected alternatives, proof, hours."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from planner.pricing.calls import CostModel
from planner.pricing.plans import PlanPrice
from planner.pricing.problem import Problem
from planner.pricing.provenance import figures_source
from planner.report.alternatives import Alternative
from planner.report.report import (
    ALTERNATIVES,
    alternative_rows,
    call_rows,
    corrections,
    host_sentences,
    mode_rows,
    proof_sentence,
    reserve_sentences,
    told_limits,
)
from planner.report.timeline import draw_bars, steady_bars
from planner.search.search import SearchResult
from rlhf_tasks.spec import CallNode, ExecutionPlan

LIMITING = 6  # most nodes of the critical cycle that are named

STYLES = {
    "generate": "black on bright_blue",
    "inference": "black on cyan",
    "train_step": "black on yellow",
    "fetch": "black on white",
    "transfer": "black on green",
    "reallocate": "black on magenta",
    "release": "black on bright_magenta",
    "onload": "black on bright_cyan",
    "offload": "black on bright_red",
    "save": "black on bright_yellow",
    "save_samples": "white on red",
    "sync": "black on bright_white",
    "evaluate": "black on bright_green",
}
"""Kind of node -> style of its bars, in a terminal with colours."""


def show_calls(console: Console, plan: ExecutionPlan, price: PlanPrice, model: CostModel) -> None:
    """Show a row per call: devices, strategy, seconds, and memory of its fullest device. Names are never cut."""
    several = len(model.classes.profiles) > 1
    whole = (Column(head, no_wrap=True) for head in ("call", "devices"))
    table = Table(*whole, *(["class"] if several else []), box=None, pad_edge=False)
    for head in ("dp", "tp", "pp", "micro-\nbatches", "offload", "seconds", "memory\nGB"):
        table.add_column(head, justify="right")
    for row in call_rows(plan, price, model):
        memory = f"{row.memory_bytes / 1e9:.3g}" + (" [red]too much[/]" if row.missing_bytes else "")
        where = (row.call, row.devices, *([row.device_class] if several else []))
        how = map(str, (row.dp, row.tp, row.pp, row.micro_batches))
        table.add_row(*where, *how, "yes" if row.offload else "", f"{row.time_s:.3g}", memory)
    console.print(f"[bold]Calls[/] on {model.classes}; memory: peak of the fullest device")
    console.print(table)
    for sentence in [*reserve_sentences(model.classes), *host_sentences(price, model)]:
        console.print(sentence, highlight=False, soft_wrap=True)
    moves = {name: price.duration_s[name] for name in price.moved_bytes}
    console.print(
        f"{len(moves)} transfers and reallocations move {sum(price.moved_bytes.values()) / 1e9:.3g} GB in "
        f"{sum(moves.values()):.3g} s per iteration.\n",
        highlight=False,
    )


def show_source(console: Console, model: CostModel) -> None:
    """Show whether the figures are measured or a preset's."""
    console.print(f"Priced by: {figures_source(model)}.\n", highlight=False, soft_wrap=True)


def show_corrections(console: Console, problem: Problem) -> None:
    """Show which calls are priced with measurements of earlier runs, and the corrections of the profiles."""
    factors = corrections(problem)
    if factors:
        told = ", ".join(
            f"{call} + {by.added_s:.3g} s" if by.added_s else f"{call} x {by.seconds:.3g}"
            for call, by in factors.items()
        )
        console.print(
            f"The profiles were corrected with measured figures of earlier runs: {told}.\n",
            highlight=False,
            soft_wrap=True,
        )


def show_timeline(console: Console, plan: ExecutionPlan, price: PlanPrice) -> None:
    """Show one iteration of the steady state: a row of bars for each group of devices."""
    console.print("[bold]One iteration of the steady state[/], by devices")
    width = max(40, min(console.width, 160) - 30)
    for line in draw_bars(steady_bars(plan, price), price.iteration_time_s, width):
        text = Text(no_wrap=True, overflow="crop")
        for piece, kind in line:
            text.append(piece, STYLES.get(kind, ""))
        console.print(text)
    console.print(f"Limited by: {limiting(plan, price)}\n", highlight=False, soft_wrap=True)


def limiting(plan: ExecutionPlan, price: PlanPrice) -> str:
    """The critical cycle in one phrase: its calls in their order, then its other nodes; at most LIMITING names."""
    cycle = price.steady.cycle
    calls = [name for name in cycle if isinstance(plan.node(name), CallNode)]
    others = [name for name in cycle if name not in calls]
    named = [" → ".join(calls[:LIMITING]), *others[: max(0, LIMITING - len(calls))]]
    told, more = ", ".join(filter(None, named)), len(cycle) - LIMITING
    return f"{told} and {more} more" if more > 0 else told


def show_proof(console: Console, result: SearchResult) -> None:
    """Show seconds per iteration, the bound, the gap, and the plans for which the bound holds."""
    sentence = f"[bold]{proof_sentence(result)}[/]\nThe bound holds for: {result.proof_class}\n"
    console.print(sentence, highlight=False, soft_wrap=True)


def show_alternatives(console: Console, rejected: Sequence[Alternative]) -> None:
    """Show for each call the best plan found with it elsewhere, and below why that is worse, or that it is not."""
    if rejected:
        console.print(f"[bold]Rejected alternatives[/]: {ALTERNATIVES}", soft_wrap=True)
        rows = alternative_rows(rejected)
        heads = ("call", "devices", "dp", "tp", "pp", "s per iteration")
        places = [
            (row.call, row.devices, *map(str, (row.dp, row.tp, row.pp)), f"{row.time_s:.4g}") for row in rows
        ]
        widths = [max(map(len, column)) for column in zip(heads, *places, strict=True)]
        for cells, why in zip([heads, *places], ["", *(row.beside_the_plan for row in rows)], strict=True):
            aligned = (
                cell.rjust(width) if n > 1 else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            console.print(Text("  ".join(aligned), "" if why else "bold"), soft_wrap=True)
            if why:
                console.print(Padding(Text(why), (0, 0, 0, 4), expand=False))
        better = min((other for other in rejected if other.is_better), key=lambda o: o.time_s, default=None)
        if better is not None:
            console.print(
                f"The plan is not the best: one with {better.call} elsewhere takes {better.time_s:.4g} s.",
                highlight=False,
                soft_wrap=True,
            )
        console.print()


def show_comparison(
    console: Console, found: Mapping[str, SearchResult | str], limits_s: Mapping[str, float], iterations: int
) -> None:
    """Show the hours that `iterations` iterations take under each mode's plan.

    limits_s  mode -> seconds that it had for its search
    """
    console.print(f"[bold]{iterations} iterations[/] under the plan of each mode; {told_limits(limits_s)}")
    table = Table("mode", "s per iteration", "hours", "against the best of these", box=None, pad_edge=False)
    for row in mode_rows(found, iterations):
        if row.time_s is None or row.hours is None:
            table.add_row(row.mode, "-", "-", row.remark)
        else:
            table.add_row(row.mode, f"{row.time_s:.4g}", f"{row.hours:.3g}", row.remark)
    console.print(table)
