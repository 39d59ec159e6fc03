"""Shows a rehearsal in the terminal, and as a document."""

import re
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from planner.pricing.calls import CostModel
from planner.pricing.host_memory import COPIES
from planner.pricing.plans import PlanPrice
from rlhf_tasks.rehearsal.costs import Costs, Machines
from rlhf_tasks.rehearsal.rehearsal import Rehearsed
from rlhf_tasks.rehearsal.story import NEAR, OWN, RUNNING, CommitMade

MOST_FAULTS = 10  # sentences of generations that ended
MOST_RANKS = 4  # that a sentence names


class Spent(NamedTuple):
    """One cause for which time was spent, its seconds, and their share of all."""

    cause: str
    seconds: float
    share: float


class Holder(NamedTuple):
    """Devices, or hosts, that hold the same: the first of them, their number, and part -> bytes."""

    first: int
    number: int
    parts: dict[str, float]


def effective_share(rehearsed: Rehearsed, costs: Costs) -> float:
    """Effective training time: the planned seconds of the committed iterations, as a share of all seconds."""
    return rehearsed.story.committed * costs.iteration_s / rehearsed.elapsed_s


def spent(rehearsed: Rehearsed, costs: Costs) -> list[Spent]:
    """Where the time went. The seconds add up to all that passed."""
    seconds, total = dict(rehearsed.story.seconds), rehearsed.elapsed_s
    planned_s = rehearsed.story.committed * costs.iteration_s
    # Iterations overlap while they wait for commits, so that running takes less than all of their planned seconds.
    beside_s = seconds.pop(RUNNING, 0.0) - planned_s
    rows = [("committed iterations, as planned", planned_s)]
    rows.append(("calls beside the plan: noise, slow hosts, shared cores, not committed, overlap", beside_s))
    rows += sorted(seconds.items(), key=lambda item: -item[1])
    return [Spent(cause, taken_s, taken_s / total) for cause, taken_s in rows if taken_s]


def device_memory(price: PlanPrice) -> list[Holder]:
    """What each device holds at its fullest moment; devices that hold the same stand together."""
    return _grouped({device: peak.parts for device, peak in price.peaks.items()})


def host_memory(rehearsed: Rehearsed, price: PlanPrice, model: CostModel) -> list[Holder]:
    """What each host's memory holds besides its system: of copies for commits the most that there were."""
    per_host, parts = model.cluster.devices_per_host, dict[int, dict[str, float]]()
    for host in range(model.cluster.n_hosts):
        process_bytes = model.classes.profile(host * per_host).process_bytes * per_host
        all_parts = {
            "copies waiting to be written": float(rehearsed.most_kept_bytes[host]),
            **{part: size for part, size in price.hosts.get(host, {}).items() if not part.endswith(COPIES)},
            "processes": float(process_bytes),
        }
        parts[host] = {part: size for part, size in all_parts.items() if size}
    return _grouped(parts)


def _grouped(parts: dict[int, dict[str, float]]) -> list[Holder]:
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for number, held in sorted(parts.items()):
        groups.setdefault(tuple(sorted((part, round(size)) for part, size in held.items())), []).append(
            number
        )
    return [Holder(members[0], len(members), parts[members[0]]) for members in groups.values()]


def commit_figures(commits: list[CommitMade], costs: Costs) -> dict[str, float]:
    """Number, bytes, lags and distances of commits, in seconds."""
    lags = sorted(commit.lag_s for commit in commits)
    apart = sorted(b.at_s - a.at_s for a, b in pairwise(commits))
    return {
        "commits": len(commits),
        "commit_bytes": costs.commit_bytes,
        "lag_median_s": median(lags) if lags else 0.0,
        "lag_longest_s": max(lags, default=0.0),
        "apart_median_s": median(apart) if apart else 0.0,
        "apart_longest_s": max(apart, default=0.0),
    }


def rehearsal_document(
    rehearsed: Rehearsed,
    costs: Costs,
    machines: Machines,
    price: PlanPrice,
    model: CostModel,
) -> dict[str, Any]:
    """All figures of a rehearsal, JSON-able."""
    story = rehearsed.story
    return {
        "ended": rehearsed.ended,
        "finished": rehearsed.finished,
        "elapsed_s": rehearsed.elapsed_s,
        "planned_iteration_s": costs.iteration_s,
        "iterations_committed": story.committed,
        "iterations_rehearsed": rehearsed.rehearsed,
        "effective_training_time": effective_share(rehearsed, costs),
        "spent": [row._asdict() for row in spent(rehearsed, costs)],
        "commits": commit_figures(story.commits, costs),
        "faults_struck": dict(story.struck),
        "generations_ended": [
            {"at_s": fault.at_s, "cause": fault.cause, "sentence": fault.sentence} for fault in story.faults
        ],
        "waits": {
            what: {"used_s": wait.used_s, "limit_s": wait.limit_s, "near": wait.near}
            for what, wait in sorted(rehearsed.watch.waits.items())
        },
        "device_memory": [holder._asdict() for holder in device_memory(price)],
        "host_memory": [holder._asdict() for holder in host_memory(rehearsed, price, model)],
        "disk_bytes_per_s": machines.disk_bytes_per_s,
    }


def show_rehearsal(
    console: Console,
    rehearsed: Rehearsed,
    costs: Costs,
    machines: Machines,
    price: PlanPrice,
    model: CostModel,
) -> None:
    """Show all figures of a rehearsal."""
    _show_head(console, rehearsed, costs, machines, model)
    table = Table(Column("where the time went", no_wrap=True), box=None, pad_edge=False)
    for head in ("seconds", "share"):
        table.add_column(head, justify="right")
    for row in spent(rehearsed, costs):
        table.add_row(row.cause, f"{row.seconds:.0f}", f"{row.share:.1%}")
    console.print(table)
    _show_commits(console, rehearsed, costs)
    _show_memory(console, "device", device_memory(price))
    _show_memory(console, "host", host_memory(rehearsed, price, model))
    _show_faults(console, rehearsed)
    _show_deadlines(console, rehearsed)


def _say(console: Console, sentence: str) -> None:
    console.print(sentence, highlight=False, soft_wrap=True)


def _show_head(
    console: Console, rehearsed: Rehearsed, costs: Costs, machines: Machines, model: CostModel
) -> None:
    story = rehearsed.story
    _say(
        console, f"[bold]Rehearsal[/] on {model.classes}, {costs.iteration_s:.4g} s per iteration by the plan"
    )
    how = "Ended" if rehearsed.finished else "[red]Failed[/]"
    _say(console, f"[bold]{how}[/] after {told(rehearsed.elapsed_s)}: {escape(shortened(rehearsed.ended))}")
    counted = story.leapt_iterations
    by = f", {counted} of them counted from rehearsed ones like them" if counted else ""
    share = effective_share(rehearsed, costs)
    _say(console, f"{story.committed} iterations committed{by}; effective training time {share:.1%}")
    _say(
        console,
        f"disk: {machines.disk_bytes_per_s / 1e9:.3g} GB/s for each host, "
        f"{machines.thread_bytes_per_s / 1e9:.3g} for one thread\n",
    )


def _show_commits(console: Console, rehearsed: Rehearsed, costs: Costs) -> None:
    figures = commit_figures(rehearsed.story.commits, costs)
    _say(
        console,
        f"\n[bold]Commits[/]: {figures['commits']:.0f} of {figures['commit_bytes'] / 1e9:.3g} GB; from one to the "
        f"next {told(figures['apart_median_s'])} (median), {told(figures['apart_longest_s'])} (longest); behind "
        f"their iterations {told(figures['lag_median_s'])} (median), {told(figures['lag_longest_s'])} (longest)",
    )


def _show_memory(console: Console, of: str, holders: list[Holder]) -> None:
    """The largest total first; what is below a hundredth of a gigabyte is left out."""
    _say(console, f"\n[bold]Memory[/] of a {of}, GB at its fullest moment")
    for holder in sorted(holders, key=lambda h: -sum(h.parts.values())):
        parts = sorted(holder.parts.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{part} {size / 1e9:.3g}" for part, size in parts if size >= 1e7)
        like = f" and {holder.number - 1} like it" if holder.number > 1 else ""
        _say(
            console,
            f"  {of} {holder.first}{like}: {sum(holder.parts.values()) / 1e9:.3g} ({listed or 'nothing'})",
        )


def _show_faults(console: Console, rehearsed: Rehearsed) -> None:
    story = rehearsed.story
    struck = ", ".join(f"{number} {kind}" for kind, number in sorted(story.struck.items())) or "none"
    _say(console, f"\n[bold]Faults[/]: {struck}; generations that ended: {len(story.faults)}")
    own = [fault for fault in story.faults if fault.cause == OWN]
    for fault in (own or story.faults)[:MOST_FAULTS]:
        _say(console, f"  at {told(fault.at_s)}, {fault.cause}: {escape(shortened(fault.sentence))}")
    if own:
        _say(console, f"  [bold red]{len(own)} of them without a fault[/]: a limit of the run is too tight")


def _show_deadlines(console: Console, rehearsed: Rehearsed) -> None:
    near = rehearsed.watch.near
    _say(
        console,
        f"\n[bold]Deadlines[/] that came within a factor of {1 / NEAR:g} of firing: {len(near) or 'none'}",
    )
    for what, wait in near.items():
        _say(
            console,
            f"  {what}: {wait.used_s:.4g} of {wait.limit_s:.4g} s at most; {wait.near} times so near",
        )


def shortened(sentence: str) -> str:
    """A sentence that names a few ranks of many."""

    def few(match: re.Match[str]) -> str:
        ranks = match[1].split(", ")
        return f"ranks {', '.join(ranks[:MOST_RANKS])} and {len(ranks) - MOST_RANKS} more"

    return re.sub(rf"ranks (\d+(?:, \d+){{{MOST_RANKS},}})", few, sentence)


def told(seconds: float) -> str:
    """Seconds for people: `95 s`, `12.5 min`, `7.1 h`."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"
