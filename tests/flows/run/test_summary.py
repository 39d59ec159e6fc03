"""The figures of a run, from rows of its lineage."""

import hashlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.summary import (
    in_short,
    keep_drift,
    metrics_of_step,
    model_card,
    planned,
    planned_and_measured,
    run_figures,
)
from prefect_rlhf.flows.view.artifacts import _planned_row
from prefect_rlhf.planner.plan.steady_state import SteadyState, steady_state
from prefect_rlhf.planner.pricing.devices import preset
from prefect_rlhf.planner.pricing.figures import RanCall, RanTurns, keep_figures, read_figures
from prefect_rlhf.planner.text import plan_table
from prefect_rlhf.rlhf_tasks.checkpoint.changes import RunPlan
from prefect_rlhf.rlhf_tasks.config.hub_names import hub_model
from prefect_rlhf.rlhf_tasks.data.hub import fetch_model
from prefect_rlhf.rlhf_tasks.spec import EvaluateNode, Part
from tests.loopback_hub import Hub
from tests.rlhf_tasks.plans import call, on, plan_of, small_plan, swapped_plan
from tests.tiny_runs import ppo_config, write_model

BY_ONE_PLAN = [RunPlan(iteration=0, plan=small_plan())]


def iteration(number: int, start: float, attempt: int, places: tuple[str, str] = ("0", "1")) -> list[dict]:
    """Three seconds: generation, half a second in which both ranks idle, then both train. places: ranks that train
    actor and critic"""
    actor, critic = places
    clocks = {
        "generate": {"0": (start, start + 1), "1": (start, start + 1)},
        "actor_train": {actor: (start + 1.5, start + 3)},
        "critic_train": {critic: (start + 1.5, start + 3)},
    }
    return [
        {
            "node": node,
            "iteration": number,
            "attempt": attempt,
            "generation": 0,
            "clocks": ranks,
            "started_s": min(begin for begin, _ in ranks.values()),
            "ended_s": max(end for _, end in ranks.values()),
            "bytes_sent": 0,
        }
        for node, ranks in clocks.items()
    ]


def test_the_metrics_of_a_step_are_found_by_its_iteration_though_a_damaged_journal_lost_some():
    rows = [{"iteration": t, "eval/reward": t / 10} for t in (0, 3, 4)]
    assert metrics_of_step(rows, 4) == rows[1]
    assert metrics_of_step(rows, 3) == metrics_of_step(rows, 0) == {}


def test_a_run_that_paused_has_the_figures_of_one_that_did_not():
    figures = [
        run_figures(BY_ONE_PLAN, iteration(0, 0.0, attempt=1) + iteration(1, start, attempt))
        for start, attempt in ((3.0, 1), (36_000.0, 2))
    ]
    assert figures[0] == figures[1]
    assert figures[0]["seconds"] == 6.0
    assert figures[0]["orchestration_overhead_s"] == pytest.approx(0.5)


def test_a_run_that_changed_its_plan_is_the_sum_of_its_parts():
    """Iterations 0 and 1 by one plan, 2 by another, after a pause in which ranks loaded the commit."""
    rows = [*iteration(0, 0.0, 1), *iteration(1, 3.0, 1)]
    later = [{**row, "generation": 1} for row in iteration(2, 60.0, 1, places=("1", "0"))]
    changed = run_figures([*BY_ONE_PLAN, RunPlan(iteration=2, plan=swapped_plan())], [*rows, *later])
    assert changed["plan_changes"] == [2]
    assert (changed["iterations"], changed["seconds"]) == (3, 9.0)
    assert changed["orchestration_overhead_s"] == pytest.approx(0.5)
    assert changed["calls"]["actor_train"]["devices"] == [1], "of the last plan"
    assert run_figures(BY_ONE_PLAN, rows)["overlaps_s"]["actor_train and critic_train"] == 3.0
    assert changed["overlaps_s"]["actor_train and critic_train"] == 4.5


def test_an_iteration_is_told_by_the_plan_that_has_its_nodes_or_not_at_all():
    """The commit at which the plan changed was damaged: the run went back to one before it, by the newer plan."""
    first, *others = small_plan().nodes
    other = small_plan().model_copy(update={"nodes": (first.model_copy(update={"name": "draw"}), *others)})
    of_other = [{**row, "node": row["node"].replace("generate", "draw")} for row in iteration(2, 3.0, 2)]
    plans = [RunPlan(iteration=0, plan=other), RunPlan(iteration=2, plan=small_plan())]
    told = run_figures(plans, [*iteration(1, 0.0, 2), *iteration(2, 3.0, 2)])
    assert (told["iterations"], told["seconds"]) == (2, 6.0)
    removed = run_figures([RunPlan(iteration=0, plan=other)], [*iteration(1, 0.0, 2), *of_other])
    assert (removed["iterations"], removed["seconds"], removed["seconds_per_iteration"]) == (2, 3.0, 3.0)


def test_iterations_on_ranks_that_the_plan_lacks_are_left_out():
    """A resumed run may have fewer ranks, and its plan the same nodes on them."""
    nodes = (
        call("generate", "policy", "generate", on(0)),
        call("actor_train", "actor", "train_step", on(0), after=("generate",)),
        call("critic_train", "critic", "train_step", on(0), after=("generate",)),
    )
    on_one = plan_of(nodes, {"actor": on(0), "critic": on(0)}, 1)
    told = run_figures([RunPlan(iteration=0, plan=on_one)], [*iteration(0, 0.0, 1), *iteration(1, 3.0, 1)])
    assert (told["seconds"], told["seconds_per_iteration"], told["calls"]) == (0, 0, {})


def test_overlaps_are_the_common_seconds_of_the_ranks_clocks():
    """The next iteration generates while both train. That real runs overlap:
    tests/rlhf_tasks/controller/test_attempt.py."""
    figures = run_figures(BY_ONE_PLAN, iteration(0, 0.0, attempt=1) + iteration(1, 2.0, attempt=1))
    assert figures["overlaps_s"] == {
        "actor_train and critic_train": 3.0,
        "actor_train and generate of the next iteration": 1.0,
        "critic_train and generate of the next iteration": 1.0,
    }


def test_a_run_is_told_in_a_line_with_the_memory_of_its_fullest_rank_and_its_pace():
    peaks = {"0": {"planned": 3.0e9, "measured": 3.9e9}, "1": {"planned": 3.0e9, "measured": 4.26e9}}
    summary = {
        "iterations": 2,
        "seconds": 61.4,
        "planned_and_measured": {"peak_memory_bytes": peaks},
        "metrics": {"reward": 0.4, "throughput/tokens_per_s": 182.6},
    }
    told = "2 iterations, which took the ranks 61 s, at most 4.3 GB on a rank, 183 tokens/s generated"
    assert in_short(summary) == told
    without = {**summary, "planned_and_measured": {"peak_memory_bytes": {}}, "metrics": {"loss/sft": 1.0}}
    assert in_short(without) == "2 iterations, which took the ranks 61 s"


def row(node, iteration, clocks, attempt=1, **peaks):
    starts, ends = zip(*clocks.values(), strict=True)
    return {
        "node": node,
        "iteration": iteration,
        "attempt": attempt,
        "generation": 0,
        "clocks": clocks,
        "started_s": min(starts),
        "ended_s": max(ends),
        "peak_bytes": {rank.removeprefix("rank"): size for rank, size in peaks.items()},
    }


def test_planned_and_measured_by_hand(expected):
    lineage = []
    for t, length in enumerate((9.0, 2.0, 4.0, 2.0)):
        start = (0.0, 20.0, 24.0, 28.0)[t]
        lineage += [
            # rank 1 comes half a second late: the call begins when both are there
            row(
                "generate",
                t,
                {"0": (start, start + 1), "1": (start + 0.5, start + 1)},
                rank0=100 + t,
                rank1=50,
            ),
            row("actor_train", t, {"0": (start + 1, start + 1 + length)}, rank0=70),
            row("critic_train", t, {"1": (start + 1, start + 2)}, rank1=90),
        ]
    found = planned_and_measured(small_plan(), expected, lineage)
    assert found["source"] == "preset of cpu-slot"
    assert found["iteration"] == {
        "planned": 3.0,
        "measured": 6.0,
    }  # ends at 10, 23, 29, 31: 13, 6 and 2 apart
    assert found["calls"]["generate"] == {"planned": 1.0, "measured": 0.5}
    assert found["calls"]["actor_train"]["measured"] == 2.0  # without the first iteration
    assert found["iterations"] == 4
    memory = ["memory in generate", "memory in actor_train"]
    assert found["drifted"] == ["generate", "actor_train", "iteration", *memory]
    assert found["call_memory_bytes"] == {
        "generate": {"planned": 15.0, "measured": 103},
        "actor_train": {"planned": 13.0, "measured": 70},
    }
    assert found["peak_memory_bytes"] == {
        "0": {"planned": 15.0, "measured": 103},
        "1": {"planned": 15.0, "measured": 90},
    }


def lineage_of(seconds: float, iterations: int):
    """Every call takes `seconds`, which is also the time of an iteration."""
    return [
        row(name, t, {"0": (t * seconds, (t + 1) * seconds)})
        for t in range(iterations)
        for name in ("generate", "actor_train", "critic_train")
    ]


def test_what_was_measured_of_turns_is_kept_beside_their_calls_seconds(expected):
    """In the median of the iterations, but for the first."""
    plan, lineage = small_plan(), lineage_of(1.5, 4)
    thought = {0: 90.0, 1: 3.0, 2: 5.0, 3: 4.0}
    for line in lineage:
        if line["node"] == "generate":
            seconds = {"throughput/think_s": thought[line["iteration"]], "throughput/longest_think_s": 9.0}
            line["turns"] = seconds | {
                "completions/mean_length": 12.5,
                "turns/observed": 6.0,
                "turns/count": 2.0,
            }
    assert keep_drift(plan, expected, planned_and_measured(plan, expected, lineage))
    ran = {one.call: one.turns for one in read_figures(expected.figures)}
    assert plan.node("generate").call.n_seqs == 8
    wanted = RanTurns(drawn=12.5, observed=6.0, mean_s=4.0, longest_s=9.0, among=4)
    assert ran == {"generate": wanted, "actor_train": None, "critic_train": None}


@pytest.mark.parametrize(("iterations", "kept"), [(2, False), (3, True)])
def test_what_a_run_found_is_kept_where_it_drifted(expected, iterations, kept):
    plan = small_plan()
    found = planned_and_measured(plan, expected, lineage_of(1.5, iterations))
    assert keep_drift(plan, expected, found) is kept
    ran = read_figures(expected.figures)
    assert [(one.call, one.seconds) for one in ran] == (
        [("generate", 1.5), ("actor_train", 1.5), ("critic_train", 1.5)] if kept else []
    )
    if kept:
        assert ran[0].assignment == plan.node("generate").assignment


def test_figures_that_cannot_be_kept_end_no_run(expected, tmp_path, monkeypatch):
    plan, taken, told = small_plan(), tmp_path / "profiles", []
    taken.write_text("no folder")
    monkeypatch.setattr(
        f"{keep_drift.__module__}.logger.warning", lambda line, *args: told.append(line % args)
    )
    found = planned_and_measured(plan, expected, lineage_of(1.5, 3))
    assert not keep_drift(plan, replace(expected, figures=taken / "ran.json"), found)
    assert str(taken) in told[0]


def test_memory_is_kept_where_it_drifted_as_what_the_call_took_beyond_parameters(expected):
    """Planned are 15 and 13 bytes, 5 of them the process's, 4 and 2 the calls' own."""
    plan, names = small_plan(), ("generate", "actor_train", "critic_train")
    taken = {"generate": {"rank0": 35}, "actor_train": {"rank0": 13, "rank1": 14}, "critic_train": {}}
    lineage = [
        row(name, t, {"0": (float(t), t + 1.0), "1": (float(t), t + 1.0)}, **taken[name])
        for t in range(3)
        for name in names
    ]
    found = planned_and_measured(plan, expected, lineage)
    assert [name for name in found["drifted"] if "memory" in name] == ["memory in generate"]
    assert keep_drift(plan, expected, found)
    ran = {one.call: one.active_bytes for one in read_figures(expected.figures)}
    assert ran == {"generate": 4 + 20, "actor_train": None, "critic_train": None}


def in_rounds(plan):
    """The plan with two rounds of generation."""
    whole = plan.node("generate")
    of_two = whole.call.model_copy(update={"chunks": 2})
    parts = [
        whole.model_copy(update={"name": f"generate_{n}", "call": of_two, "part": Part(n, 2)}) for n in (0, 1)
    ]
    train = plan.node("actor_train")
    train = train.model_copy(update={"call": train.call.model_copy(update={"rounds": 2})})
    others = [train if node.name == train.name else node for node in plan.nodes if node != whole]
    return plan.model_copy(update={"nodes": (*parts, *others)})


def test_a_round_that_was_not_needed_says_nothing_of_its_call(expected):
    """The first round drifts in time; the second takes neither time nor memory."""
    plan = in_rounds(small_plan())
    price = expected.price
    parts = {"generate_0": 1.0, "generate_1": 1.0}
    price = replace(price, duration_s=price.duration_s | parts, call_bytes=dict.fromkeys(parts, 10.0))
    active = expected.active_bytes | dict.fromkeys(parts, 4.0)
    expected = replace(expected, price=price, active_bytes=active)
    lineage = []
    for t in map(float, range(4)):
        lineage += [
            row("generate_0", int(t), {"0": (4 * t, 4 * t + 2)}, rank0=15),
            row("generate_1", int(t), {"0": (4 * t + 2, 4 * t + 2)}, rank0=1),
            row("actor_train", int(t), {"0": (4 * t + 2, 4 * t + 3)}, rank0=1),
            row("critic_train", int(t), {"1": (4 * t + 2, 4 * t + 3)}, rank1=1),
        ]
    found = planned_and_measured(plan, expected, lineage)
    assert set(found["calls"]) == {"generate_0", "actor_train", "critic_train"}
    assert [name for name in found["drifted"] if name != "iteration"] == ["generate_0"]
    assert keep_drift(plan, expected, found)
    ran = {one.call: one for one in read_figures(expected.figures)}
    assert (ran["generate"].seconds, ran["generate"].active_bytes) == (2.0, None)


def test_what_came_as_planned_is_not_kept(expected):
    seconds = dict.fromkeys(expected.price.duration_s, 1.2)
    price = replace(expected.price, duration_s=seconds, steady=SteadyState(1.2, (), {}))
    as_planned = replace(expected, price=price)
    found = planned_and_measured(small_plan(), as_planned, lineage_of(1.2, 5))
    assert found["drifted"] == []
    assert not keep_drift(small_plan(), as_planned, found)
    assert not expected.figures.exists()


def evaluated_run(expected, every: int, evaluation_s: float = 20.0):
    """(plan, what was expected, lineage of 6 iterations): training takes a second as planned, then an evaluation."""
    place = on(0)
    nodes = (
        call("actor_train", "actor", "train_step", place),
        EvaluateNode(name="evaluate_actor", role="actor", placement=place, after=("actor_train",)),
    )
    plan = plan_of(nodes, {"actor": place}, 1)
    seconds, rare_s = {"actor_train": 1.0, "evaluate_actor": 20.0 / every}, {"evaluate_actor": 20.0}
    price = replace(
        expected.price,
        duration_s=seconds,
        rare_s=rare_s,
        call_bytes={},
        steady=steady_state(plan, seconds),
    )
    lineage, now = [], 0.0
    for t in range(6):
        asked_s = evaluation_s if (t + 1) % every == 0 else 0.0
        train, evaluation = {"0": (now, now + 1.0)}, {"0": (now + 1.0, now + 1.0 + asked_s)}
        lineage += [
            row("actor_train", t, train) | {"flops": 1.0},
            row("evaluate_actor", t, evaluation) | {"flops": asked_s},
        ]
        now += 1.0 + asked_s
    return plan, replace(expected, price=price), lineage


@pytest.mark.parametrize(("every", "seconds"), [(1, 21.0), (2, 1.0), (3, 1.0), (20, 1.0)])
def test_an_iteration_with_an_evaluation_is_compared_with_no_other(expected, every, seconds):
    """All is as planned. The plan's mean iteration, 21 / every s and more, is none that is measured."""
    plan, as_planned, lineage = evaluated_run(expected, every)
    found = planned_and_measured(plan, as_planned, lineage)
    assert found["iteration"] == {"planned": seconds, "measured": seconds}
    assert found["drifted"] == []


def test_an_evaluation_that_drifted_corrects_no_price_and_is_no_reason_to_plan_anew(expected):
    plan, as_planned, lineage = evaluated_run(expected, 2, evaluation_s=40.0)
    found = planned_and_measured(plan, as_planned, lineage)
    assert found["drifted"] == ["evaluate_actor"]
    assert not keep_drift(plan, as_planned, found)
    assert not expected.figures.exists()


def test_one_iteration_is_better_than_none(expected):
    lineage = [row(name, 0, {"0": (1.0, 3.0)}) for name in ("generate", "actor_train", "critic_train")]
    found = planned_and_measured(small_plan(), expected, lineage)
    assert found["iteration"]["measured"] == 2.0
    assert found["calls"]["generate"]["measured"] == 2.0


def test_a_pause_between_two_attempts_is_no_part_of_an_iteration(expected):
    lineage = []
    for t, (attempt, start) in enumerate(((1, 0.0), (1, 3.0), (2, 36_000.0))):
        lineage.append(row("generate", t, {"0": (start, start + 1)}, attempt))
        lineage += [
            row(name, t, {"0": (start + 1, start + 2)}, attempt) for name in ("actor_train", "critic_train")
        ]
    assert planned_and_measured(small_plan(), expected, lineage)["iteration"]["measured"] == 3.0


def test_the_table_says_how_far_off():
    line = _planned_row("iteration", "s", {"planned": 3.0, "measured": 2.0})
    assert line == {
        "what": "iteration",
        "planned": 3.0,
        "measured": 2.0,
        "unit": "s",
        "measured is": "33% less than planned",
    }


def test_a_run_is_priced_before_it_starts(tmp_path):
    from prefect_rlhf.flows.run.prepare import prepare

    config = ppo_config(tmp_path, cluster={"devices_per_host": 2})
    prepared = prepare(config)
    plan = prepared.plan
    expectation = planned(config, plan, prepared.problem)
    assert expectation.source == "preset of cpu-slot"
    assert "prefect-rlhf profile" in expectation.note
    assert expectation.price.duration_s.keys() == {node.name for node in plan.nodes}
    assert expectation.process_bytes > 0


@pytest.mark.parametrize(
    ("device", "peak"),
    [(None, 2 * 171e9), ("h100-sxm", 2 * 989e12)],
)
def test_the_peak_that_mfu_refers_to_is_of_all_devices(tmp_path, device, peak):
    from prefect_rlhf.flows.run.prepare import prepare

    config = ppo_config(tmp_path, cluster={"devices_per_host": 2}, planning={"device": device})
    prepared = prepare(config)
    assert planned(config, prepared.plan, prepared.problem).peak_flops_per_s == peak


def test_the_next_run_goes_by_what_the_last_one_found(tmp_path):
    from prefect_rlhf.flows.run.prepare import prepare

    config = ppo_config(tmp_path, cluster={"devices_per_host": 2})
    prepared = prepare(config)
    plan = prepared.plan
    before = planned(config, plan, prepared.problem)
    seconds = before.price.duration_s["actor_train"]
    ran = RanCall(call="actor_train", assignment=plan.node("actor_train").assignment, seconds=3 * seconds)
    keep_figures(before.figures, [ran])
    after = planned(config, plan, prepare(config).problem)
    dispatch_s = preset("cpu-slot").dispatch_s  # between nodes: no run's clocks show it in a call
    assert after.price.duration_s["actor_train"] == pytest.approx(3 * seconds + dispatch_s)
    assert after.source.endswith("corrected by measured figures of actor_train")
    larger = ppo_config(tmp_path, cluster={"devices_per_host": 2}, batch_size=32)
    of_larger = prepare(larger)
    assert planned(larger, of_larger.plan, of_larger.problem).source == before.source, "another workload"


def test_the_card_tells_where_the_weights_come_from(tmp_path):
    reward = {
        "function": "tests.tiny_reward:length_reward",
        "kwargs": {"bearer": "hunter2", "scale": 2},
    }
    prepared = prepare(ppo_config(tmp_path, rewards=[reward]))
    card = model_card(prepared, "mine", "actor", {"iteration": 2, "reward": 0.2512345, "kl": None})
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header) == {"library_name": "transformers", "tags": ["prefect-rlhf", "ppo"]}
    assert "# mine" in text
    assert "started from `actor`" in text
    assert "## Metrics of iteration 3\n" in text
    assert "| reward | 0.2512 |\n| kl |  |\n" in text
    assert "| iteration |" not in text
    assert prepared.rows.digest in text
    assert len(prepared.rows.digest) == len(hashlib.sha256().hexdigest())
    assert plan_table(prepared.plan) in text
    assert "- transformers 5" in text
    shown = yaml.safe_load(text.split("```yaml\n")[1].removesuffix("```\n"))
    assert "kwargs" not in shown["rewards"][0]
    assert shown["data"]["max_prompt_tokens"] == 1024
    assert "hunter2" not in card


def test_a_card_names_files_and_folders_without_where_they_are_on_this_machine(tmp_path):
    prepared = prepare(ppo_config(tmp_path))
    card = model_card(prepared, "mine", "actor", {})
    shown = yaml.safe_load(card.split("```yaml\n")[1].removesuffix("```\n"))
    (source,) = prepared.config.data.sources
    assert shown["data"]["train"] == Path(source.path).name
    assert shown["models"]["actor"] == "actor"
    assert "output_dir" not in shown
    assert str(tmp_path) not in card


def test_the_license_is_that_of_the_base_as_it_was_downloaded(hub: Hub, tmp_path):
    write_model(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    hub.add_folder("org/base", tmp_path / "base")
    name = hub_model("org/base")
    assert name is not None
    with hub.used_here(tmp_path / "home"):
        base = fetch_model(name, None, lambda what, total: nullcontext(lambda arrived: None)).folder
    models = {"actor": str(base), "reward": str(tmp_path / "reward")}
    card = model_card(prepare(ppo_config(tmp_path, models=models)), "mine", "actor", {})
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "apache-2.0"


@pytest.mark.parametrize(
    ("lora", "library", "relation"), [(None, "transformers", "finetune"), ({"rank": 2}, "peft", "adapter")]
)
def test_the_header_of_a_card_names_base_model_data_and_license_by_what_the_hub_knows(
    tmp_path, lora, library, relation
):
    cache = tmp_path / "hub" / "models--org--base" / "snapshots" / ("a" * 40)
    write_model(cache)
    (cache / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    config = ppo_config(tmp_path, models={"actor": str(cache), "reward": str(tmp_path / "reward")}, lora=lora)
    prepared = prepare(config)
    named = replace(
        prepared,
        config=config.model_copy(update={"data": config.data.model_copy(update={"train": "org/rows"})}),
    )
    _, header, text = model_card(named, "mine", "actor", {}).split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": library,
        "base_model": "org/base",
        "base_model_relation": relation,
        "datasets": ["org/rows"],
        "license": "apache-2.0",
        "tags": ["prefect-rlhf", "ppo"],
    }
    assert f"It started from `org/base@{'a' * 40}`." in text


def test_a_card_without_metrics_has_no_empty_table(tmp_path):
    card = model_card(prepare(ppo_config(tmp_path)), "mine", "actor", {})
    assert "Metrics" not in card
