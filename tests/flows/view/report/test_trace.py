"""A trace has the format that Perfetto reads, and tells the truth about who waited for whom."""

import json
from collections import defaultdict

import pytest

from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.view.clocks import spans_of
from prefect_rlhf.flows.view.report import trace
from prefect_rlhf.flows.view.report.trace import trace_events
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.flows.reported_run import RECORDED, recorded_run, whole_row
from tests.rlhf_tasks.plans import small_plan

PLAN = ExecutionPlan.model_validate(RECORDED["plan"])
ROWS = [whole_row(row) for row in RECORDED["lineage"]]
KEYS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "t": {"name", "cat", "ph", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "ph", "id", "ts", "pid", "tid", "bp"},
}


def refuse_malformed(events: list[dict]) -> None:
    """Raises AssertionError where the events are not as Chrome's trace event format has them."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    slices, flows = defaultdict(list), defaultdict(list)
    for event in events:
        assert event.keys() == KEYS[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            continue
        assert event["pid"] in processes
        assert (event["pid"], event["tid"]) in named
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        else:
            flows[event["id"]].append(event)
    for of_thread in slices.values():  # none begins inside another and ends after it
        open_until: list[float] = []
        for start, end in sorted(of_thread, key=lambda times: (times[0], -times[1])):
            while open_until and open_until[-1] <= start + 0.11:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.11
            open_until.append(end)
    for steps in flows.values():
        assert [step["ph"] for step in steps] in (["s", "f"], ["s", "t", "f"])
        assert [step["ts"] for step in steps] == sorted(step["ts"] for step in steps)
        for step in steps:
            within = slices[step["pid"], step["tid"]]
            assert any(start - 0.11 <= step["ts"] <= end + 0.11 for start, end in within), step


def test_a_trace_is_well_formed_and_has_every_node_of_every_rank():
    events = trace_events(PLAN, ROWS, spans_of(PLAN, ROWS))
    refuse_malformed(events)
    nodes = [event for event in events if event["ph"] == "X" and event["cat"] != "wait"]
    assert len(nodes) == sum(len(row["clocks"]) for row in ROWS)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    [first] = [
        e for e in nodes if e["name"] == "actor_generate" and e["args"]["iteration"] == 10 and e["tid"] == 0
    ]
    clocks = next(row["clocks"]["0"] for row in ROWS if row["node"] == "actor_generate")
    assert first["dur"] == pytest.approx(1e6 * (clocks[1] - clocks[0]), abs=0.1), "microseconds"
    assert first["args"]["bytes_sent"] == 1024


def row(node: str, **clocks: tuple[float, float]) -> dict:
    return whole_row(
        {
            "iteration": 0, "node": node, "attempt": 1, "generation": 0,
            "clocks": {rank.removeprefix("rank"): times for rank, times in clocks.items()},
        }
    )  # fmt: skip


def test_a_rank_that_is_early_waits_until_the_last_one_begins():
    rows = [row("generate", rank0=(0.0, 3.0), rank1=(2.0, 3.0))]
    waits = [
        e for e in trace_events(small_plan(), rows, spans_of(small_plan(), rows)) if e.get("cat") == "wait"
    ]
    assert [(e["name"], e["ts"], e["dur"]) for e in waits] == [("waits in generate", 0.0, 2e6)]


def test_arrows_lead_from_the_call_that_was_waited_for_through_the_move_to_the_next_call():
    events = trace_events(PLAN, ROWS, spans_of(PLAN, ROWS))
    at = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] != "wait":
            at.setdefault((event["pid"], event["tid"]), []).append(event)
    chains = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            of_thread = at[event["pid"], event["tid"]]
            inside = [
                s["name"] for s in of_thread if s["ts"] - 0.11 <= event["ts"] <= s["ts"] + s["dur"] + 0.11
            ]
            chains[event["id"]].append(inside[-1])
    shown = {" > ".join(chain) for chain in chains.values()}
    assert "actor_generate > transfer_actor_generate_to_reward_inference > reward_inference" in shown
    assert "actor_train > reallocate_actor_to_actor_generate > actor_generate" in shown


def test_of_a_long_run_the_newest_iterations_are_in_the_trace(monkeypatch):
    monkeypatch.setattr(trace, "MOST_SPANS", len(spans_of(PLAN, ROWS)) - 1)
    events = trace_events(PLAN, ROWS, spans_of(PLAN, ROWS))
    refuse_malformed(events)
    iterations = {event["args"]["iteration"] for event in events if event["ph"] == "X"}
    assert iterations == {11, 12}


def test_the_command_writes_a_trace_that_reads_as_json(tmp_path, capsys):
    file = tmp_path / "trace.json"
    assert run_command(["report", str(recorded_run(tmp_path)), "--trace", str(file)]) == 0
    document = json.loads(file.read_text())
    refuse_malformed(document["traceEvents"])
    assert f"{len(document['traceEvents'])} events" in capsys.readouterr().out
