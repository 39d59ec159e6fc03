"""`prefect-rlhf plan`: what it prints and writes, and one sentence with status 2 for every mistake."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import AbstractContextManager, nullcontext
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from prefect_rlhf import deployments
from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.commands.plans import limiting, show_alternatives, show_calls, show_comparison
from prefect_rlhf.flows.run.planning import hardware_of, problem_of
from prefect_rlhf.planner.plan.steady_state import SteadyState
from prefect_rlhf.planner.pricing.plans import PlanPrice
from prefect_rlhf.planner.report import Alternative
from prefect_rlhf.planner.search.search import find_plan
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config, manual_assignments
from prefect_rlhf.rlhf_tasks.spec import CallAssignment, CallNode
from tests.flows.plan_documents import DISJOINT, KEYS, ppo, refused
from tests.ppo_calls import PPO_CALLS
from tests.rlhf_tasks.plans import call, on, plan_of, small_plan

pytestmark = pytest.mark.timeout(1800)  # the first to evaluate plans compiles that
TO_THE_END = "600"  # seconds; the search ends as soon as it has its proof
EXAMPLES = Path(deployments.__file__).with_name("examples")


@pytest.mark.parametrize("mode", ["search", "heuristic", "symmetric"])
def test_a_plan_is_shown_and_its_figures_are_written(run_plan, tmp_path, mode):
    figures = tmp_path / "figures.json"
    status, out, err = run_plan(
        ppo(), "--mode", mode, "--no-compare", "--time-limit", TO_THE_END, "--json", str(figures)
    )
    assert status == 0, err
    assert all(name in out for name in PPO_CALLS)
    assert ("first answer: the heuristic's plan takes" in out.split("\n")[0]) == (mode == "search")
    found = json.loads(figures.read_text())
    assert set(found) == KEYS
    assert set(found["assignments"]) == set(PPO_CALLS)
    assert 0 < found["lower_bound_s"] <= found["iteration_time_s"]
    assert found["gap"] == pytest.approx(1 - found["lower_bound_s"] / found["iteration_time_s"])
    assert found["search"]["mode"] == mode
    assert set(found["search"]) == {"mode", "seconds", "compile_s", "evaluations", "late"}
    assert (found["search"]["compile_s"] > 0) == (mode == "search") == ("s of compilation" in out)
    for given in found["assignments"].values():
        assert set(given) == {
            *(
                "nodes",
                "device_classes",
                "devices",
                "dp",
                "tp",
                "pp",
                "cp",
                "shard",
                "micro_batches",
                "offload",
                "time_s",
            )
        }
        assert given["dp"] * given["tp"] * given["pp"] == len(given["devices"])
        assert given["nodes"] == [0]
    assert found["peak_memory_bytes"].keys() == {"0", "1"}
    assert all(0 < size < 4e9 for size in found["peak_memory_bytes"].values())


@pytest.mark.whole
def test_the_modes_are_compared_by_hours(run_plan):
    status, out, err = run_plan(ppo(), "--mode", "heuristic", "--time-limit", "1", "--iterations", "7200")
    assert status == 0, err
    assert "Rejected alternatives" in out
    rows = {line.split()[0]: line.split() for line in out.split("7200 iterations")[1].splitlines() if line}
    assert "on devices of their own" in " ".join(rows["disjoint"]), "four roles do not fit two devices"
    for mode in ("search", "mcmc", "heuristic", "symmetric"):
        time_s, hours = float(rows[mode][1]), float(rows[mode][2])
        assert hours == pytest.approx(2 * time_s, rel=0.02), rows[mode]


@pytest.mark.whole
def test_a_plan_by_hand_is_compared_with_the_modes_and_with_better_places(run_plan, write):
    on_one = dict.fromkeys(DISJOINT, "0 m4")  # slower than any mode's plan
    status, out, err = run_plan(
        ppo(), "--evaluate", write(on_one), "--time-limit", "10", "--iterations", "7200"
    )
    assert status == 0, err
    alternatives, hours = out.split("Rejected alternatives")[1].split("7200 iterations")
    assert "the other calls may have moved too" in alternatives
    assert "faster by" in alternatives
    assert "The plan is not the best" in alternatives
    assert "takes as long" not in alternatives
    assert "time limits: search 5 s, mcmc 5 s" in hours
    rows = {line.split()[0]: line.split() for line in hours.splitlines() if line}
    assert float(rows["manual"][1]) > float(rows["search"][1])
    assert rows["manual"][3].startswith("+")


def test_a_search_says_that_the_first_one_compiles(run_plan, monkeypatch):
    told = []

    def status(text: str) -> AbstractContextManager[None]:
        told.append(text)
        return nullcontext()

    monkeypatch.setattr("prefect_rlhf.flows.commands.plans.console.status", status)
    for mode in ("search", "heuristic"):
        assert run_plan(ppo(), "--mode", mode, "--no-compare", "--time-limit", "0.5")[0] == 0
    first, second = told
    assert first.startswith("search, up to 0.5 s; ")
    assert "first time" in first
    assert "a minute" in first
    assert second == "heuristic ...", "it compiles nothing and has no limit"


def test_a_found_plan_is_what_a_run_accepts_and_is_priced_alike(run_plan, tmp_path):
    plan, first, second = (str(tmp_path / name) for name in ("plan.yaml", "first.json", "second.json"))
    status, _, err = run_plan(ppo(), "--mode", "symmetric", "--no-compare", "--json", first, "--out", plan)
    assert status == 0, err
    config = make_config(ppo(plan=plan))
    read = manual_assignments(config)
    assert read is not None
    status, _, err = run_plan(ppo(), "--evaluate", plan, "--no-compare", "--json", second)
    assert status == 0, err
    before, after = (json.loads(Path(path).read_text()) for path in (first, second))
    assert after["search"]["mode"] == "manual"
    for key in ("assignments", "iteration_time_s", "peak_memory_bytes", "transfers"):
        assert before[key] == after[key]
    for name, given in before["assignments"].items():
        assert list(read[name].placement.devices) == given["devices"]
        assert read[name].micro_batches == given["micro_batches"]


def test_a_searched_plan_keeps_its_order_of_calls(run_plan, tmp_path):
    plan, first, second = (str(tmp_path / name) for name in ("plan.yaml", "first.json", "second.json"))
    limit = ("--no-compare", "--time-limit", TO_THE_END)
    status, _, err = run_plan(ppo(), *limit, "--json", first, "--out", plan)
    assert status == 0, err
    written = yaml.safe_load(Path(plan).read_text())
    assert sorted(place.rpartition(" ")[2] for place in written.values()) == [f"order{n}" for n in range(6)]
    status, _, err = run_plan(ppo(), *limit, "--evaluate", plan, "--json", second)
    assert status == 0, err
    before, after = (json.loads(Path(path).read_text()) for path in (first, second))
    assert before["iteration_time_s"] == after["iteration_time_s"]
    assert list(before["assignments"]) == list(after["assignments"])
    written["critic_train"] = written["critic_train"].rpartition(" ")[0]
    Path(plan).write_text(yaml.safe_dump(written))
    refused(run_plan(ppo(), *limit, "--evaluate", plan), "critic_train has none", "or leave all out")


def test_a_manual_plan_has_its_price_and_its_transfers(run_plan, write, tmp_path):
    figures = tmp_path / "figures.json"
    status, _, err = run_plan(ppo(), "--evaluate", write(DISJOINT), "--no-compare", "--json", str(figures))
    assert status == 0, err
    found = json.loads(figures.read_text())
    assert found["assignments"]["critic_train"]["devices"] == [1]
    assert found["assignments"]["critic_train"]["micro_batches"] == 2
    moved = {move["name"]: move for move in found["transfers"]}
    to_reward = moved["transfer_actor_generate_to_reward_inference"]
    assert to_reward["source"] == [0]
    assert to_reward["destination"] == [1]
    # 8 sequences of 32 tokens: input_ids of 8 bytes and the mask of 1; truncated; columns with the prompt
    assert to_reward["bytes"] >= 8 * 32 * 9


def test_a_manual_plan_may_offload_a_frozen_model(run_plan, write, tmp_path):
    """Its onload and offload cost their dispatches, and it needs no more memory."""
    resident, offloaded = (tmp_path / name for name in ("resident.json", "offloaded.json"))
    for plan, figures in ((DISJOINT, resident), ({**DISJOINT, "ref_inference": "0 offload"}, offloaded)):
        status, out, err = run_plan(ppo(), "--evaluate", write(plan), "--no-compare", "--json", str(figures))
        assert status == 0, err
        row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["ref_inference"])
        assert ("yes" in row) == (figures == offloaded)
    before, after = (json.loads(path.read_text()) for path in (resident, offloaded))
    assert after["assignments"]["ref_inference"]["offload"]
    assert after["iteration_time_s"] >= before["iteration_time_s"]
    assert after["peak_memory_bytes"]["0"] <= before["peak_memory_bytes"]["0"]


def test_sharded_weights_have_a_column_where_there_are_some(run_plan, write):
    plan = {**DISJOINT, "actor_train": "0-1 d2 sharded"}
    heads = {}
    for name, its in (("none", DISJOINT), ("some", plan)):
        status, out, err = run_plan(ppo(), "--evaluate", write(its), "--no-compare")
        assert status == 0, err
        heads[name] = "sharded" in out
        row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["actor_train"])
        assert ("yes" in row) == (name == "some")
    assert heads == {"none": False, "some": True}


def test_a_plan_that_does_not_fit_is_priced_and_refused_with_device_and_bytes(run_plan, write):
    small = {"n_hosts": 1, "devices_per_host": 2, "device": {"like": "cpu-slot", "memory_bytes": 2_000_000}}
    status, out, err = run_plan(
        ppo(), "--evaluate", write(DISJOINT, "plan.yaml"), "--cluster", write(small, "cluster.yaml")
    )
    assert "critic_train" in out, "the price is shown nevertheless"
    warning, error = err.splitlines(keepends=True)
    assert "memory_bytes=2e+06 is implausible" in warning
    refused((status, out, error), "plan.yaml does not fit", "Device ", " lacks ", " bytes", "would lower it")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"actor_trains": "0"}, ("actor_trains", "the calls of ppo are actor_generate")),
        ({"actor_train": "0-1 d4"}, ("actor_train", "dp=4", "4 devices", "file.yaml")),
        ({"actor_train": "2"}, ("actor_train", "devices 0 to 1")),
        (
            {"actor_generate": "0 offload"},
            ("actor_generate", "offload is for frozen roles"),
        ),
        (
            {"actor_train": {"devices": [0], "tp": 1}},
            ("file.yaml: actor_train: {'devices': [0], 'tp': 1} is no placement", "0-3 d2 t2 p1 m4"),
        ),
        (
            {"actor_train": "0-1 d2 m5000"},
            ("actor_train", "micro_batches=5000", "at most 2 micro-batches"),
        ),
        ({"actor_train": "0-1 p2", "critic_train": ""}, ("critic_train",)),
    ],
)
def test_a_find_plan_another_graph_or_cluster_is_refused(run_plan, write, change, parts):
    refused(run_plan(ppo(), "--evaluate", write({**DISJOINT, **change})), *parts)


def test_a_plan_that_leaves_a_call_out_is_refused(run_plan, write):
    part = {name: place for name, place in DISJOINT.items() if name != "ref_inference"}
    refused(run_plan(ppo(), "--evaluate", write(part)), "says nothing about ref_inference")


@pytest.mark.parametrize("iterations", ["-5", "1.5", "many"])
def test_hours_of_no_number_of_iterations_are_refused(run_plan, iterations):
    outcome = run_plan(ppo(), "--mode", "heuristic", "--iterations", iterations)
    refused(outcome, f"--iterations {iterations}: ", "at least one")


@pytest.mark.parametrize("seed", ["-1", "1.5", "x", str(2**63)])
def test_what_is_no_seed_is_refused_before_the_search(run_plan, seed):
    """Which would refuse its time limit."""
    outcome = run_plan(ppo(), "--time-limit", "0", "--seed", seed)
    refused(outcome, f"--seed {seed}: ", "a whole number from 0 to 9223372036854775807")
    refused(run_plan(ppo(), "--time-limit", "0", "--seed", str(2**63 - 1)), "a search takes more than 0 and")


def test_an_output_that_cannot_be_written_is_refused_before_the_search(run_plan, tmp_path):
    """Which would refuse its time limit."""
    lost = str(tmp_path / "no" / "figures.json")
    refused(run_plan(ppo(), "--time-limit", "0", "--json", lost), "figures.json cannot be written")


@pytest.mark.parametrize("other", ["figures.json", "./figures.json", "sub/../figures.json", "link.json"])
def test_two_outputs_to_one_file_are_refused_before_the_search(run_plan, tmp_path, monkeypatch, other):
    """Which would refuse its time limit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.json").symlink_to("figures.json")
    outputs = ("--json", str(tmp_path / "figures.json"), "--out", other)
    outcome = run_plan(ppo(), "--time-limit", "0", *outputs)
    refused(outcome, "figures.json are the same file", str(Path(other)), "Name two files.")
    outputs = ("--json", str(tmp_path / "figures.json"), "--out", "plan.yaml")
    refused(run_plan(ppo(), "--time-limit", "0", *outputs), "--time-limit 0: a search takes more than 0 and")


@pytest.mark.parametrize("limit", ["-1", "0", "nan", "inf", "1e99"])
def test_a_time_limit_that_is_none_is_refused_before_any_answer(run_plan, limit):
    status, out, err = run_plan(ppo(), "--time-limit", limit)
    refused((status, out, err), f"--time-limit {float(limit):g}: a search takes more than 0 and at most")
    assert out == ""


def test_the_help_says_what_is_done_under_any_time_limit(capsys):
    assert run_command(["plan", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "Plans made by a rule get a second under any limit, since otherwise there may be no plan." in told
    assert "The comparison takes extra time; --no-compare" in told


@pytest.mark.whole
@pytest.mark.parametrize(
    ("mode", "divides"), [("colocated", True), ("disjoint", True), ("heuristic", False), ("hybrid", False)]
)
def test_systems_that_divide_sequences_do_so_where_memory_asks_for_it(run_plan, tmp_path, mode, divides):
    document = yaml.safe_load((EXAMPLES / "plan-grpo-7b-32k.yaml").read_text())
    document["sampling"]["max_completion_length"] = 130_000
    document["models"]["actor"]["max_position_embeddings"] = 262_144
    figures = tmp_path / "figures.json"
    status, _, err = run_plan(document, "--mode", mode, "--no-compare", "--json", str(figures))
    assert status == 0, err
    assert (json.loads(figures.read_text())["assignments"]["actor_train"]["cp"] > 1) == divides


def test_inline_models_are_planned_but_not_run(run_plan, tmp_path):
    run = ["run", "ppo", "--config", str(tmp_path / "run.yaml")]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(ppo()))
    assert run_command(run) == 2
    grpo = {**ppo(), "type": "grpo", "num_generations": 4}
    status, out, err = run_plan(grpo, "--mode", "heuristic", "--no-compare")
    assert status == 0, err
    assert "critic" not in out
    assert run_command(["run", "grpo", "--config", str(tmp_path / "run.yaml")]) == 2


@pytest.mark.whole
def test_planning_loads_neither_torch_nor_prefect(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(ppo()))
    code = (
        "import sys; from prefect_rlhf.flows.cli import run_command; status = run_command(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'prefect', 'prefect_dask', 'distributed', 'matplotlib'}; "
        "print('loaded:', sorted(heavy & sys.modules.keys())); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "plan", "--config", str(tmp_path / "run.yaml")]
    done = subprocess.run([*command, "--mode", "heuristic"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("loaded: []\n"), done.stdout


INTERRUPTED = """
    import sys
    from prefect_rlhf.flows.cli import run_command
    from prefect_rlhf.flows.commands import plans

    find_plan = plans.find_plan

    def told(*arguments, called_off):
        looks = []

        def off():
            looks.append(1)
            if len(looks) == 3:
                print("searching", flush=True)
            return called_off()

        return find_plan(*arguments, called_off=off)

    plans.find_plan = told
    sys.exit(run_command(sys.argv[1:]))
"""


@pytest.mark.parametrize("mode", ["search", "mcmc"])
def test_ctrl_c_ends_a_search_with_the_plan_found_by_then(tmp_path, mode):
    """A signal that comes while compiled code anneals: its exception must not be raised there."""
    config, found = EXAMPLES / "plan-ppo-70b-70b.yaml", tmp_path / "plan.json"
    arguments = ["--mode", mode, "--time-limit", TO_THE_END, "--json", str(found), "--no-compare"]
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(INTERRUPTED),
        "plan",
        "--config",
        str(config),
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parents[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("first answer")
        assert process.stdout.readline() == "searching\n"
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=500)[1]
    assert process.returncode == 0, told
    assert "ending with the best plan found so far" in told
    document = json.loads(found.read_text())
    assert document["search"]["mode"] == mode
    assert document["search"]["seconds"] < 500
    assert not document["proven_optimal"]


@pytest.fixture
def console() -> Console:
    return Console(width=140, file=StringIO())


def text_of(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def limits(plan, *cycle: str) -> str:
    return limiting(plan, PlanPrice({}, {}, SteadyState(3.0, cycle, {}), {}, {}))


def test_what_limits_a_plan_names_calls_first_and_six_nodes_at_most():
    assert (
        limits(small_plan(), "save_actor", "generate", "actor_train") == "generate → actor_train, save_actor"
    )
    calls = [f"call_{i}" for i in range(8)]
    eight = plan_of(tuple(call(name, "actor", "inference", on(0)) for name in calls), {"actor": on(0)}, 1)
    assert limits(eight, *calls) == f"{' → '.join(calls[:6])} and 2 more"
    names = [node.name for node in small_plan().nodes]
    assert all(not isinstance(small_plan().node(name), CallNode) for name in names if name.startswith("save"))
    assert limits(small_plan(), *names) == "generate → actor_train → critic_train, save_actor, save_critic"


def rejected(*rows: tuple[str, float, bool]) -> list[Alternative]:
    place = CallAssignment(placement=on(0))
    return [Alternative(name, place, time_s, time_s - 3, "a reason", better) for name, time_s, better in rows]


def test_a_faster_alternative_says_that_the_plan_is_not_the_best(console):
    show_alternatives(console, rejected(("a", 4.0, False), ("b", 2.5, True), ("c", 2.0, True)))
    assert "The plan is not the best: one with c elsewhere takes 2 s." in text_of(console)
    assert "as planned" not in text_of(console)


def test_alternatives_are_readable_on_80_columns():
    """A line with the call's name, place and seconds, and beneath whole words."""
    console = Console(width=80, file=StringIO())
    place = CallAssignment(placement=on(*range(8, 64)))
    reason = f"more load on the critical cycle {' -> '.join(PPO_CALLS)}"
    show_alternatives(console, [Alternative(name, place, 20.63, 1.0, reason, False) for name in PPO_CALLS])
    _, heads, *lines = text_of(console).splitlines()
    assert heads.split("  ")[0] == "call"
    assert "…" not in text_of(console)
    for name in PPO_CALLS:
        start = next(n for n, line in enumerate(lines) if line.startswith(name))
        assert lines[start].split() == [name, "8-63", "56", "1", "1", "20.63"]
        beneath = [line.strip() for line in lines[start + 1 : start + 4]]
        assert " ".join(beneath).startswith(reason)
        assert all(len(line) > 40 for line in beneath[:2]), "not a word on a line"
    assert max(map(len, lines)) <= 80


def test_of_slower_alternatives_no_such_thing_is_said(console):
    show_alternatives(console, rejected(("a", 4.0, False), ("b", 2.5, False)))
    assert "the other calls may have moved too" in text_of(console)
    assert "not the best" not in text_of(console)


def test_the_hours_tell_how_long_modes_were_given(console):
    found = {"manual": SimpleNamespace(iteration_time_s=4.0), "mcmc": SimpleNamespace(iteration_time_s=2.0)}
    show_comparison(console, {**found, "disjoint": "Too small."}, {"search": 60.0, "mcmc": 5.0}, 3600)
    head, _, *rows = text_of(console).splitlines()
    assert head == "3600 iterations under the plan of each mode; time limits: search 60 s, mcmc 5 s"
    assert [row.split() for row in rows] == [
        ["manual", "4", "4", "+100.0%"],
        ["mcmc", "2", "2"],
        ["disjoint", "-", "-", "Too", "small."],
    ]


def test_names_of_calls_are_whole_on_a_narrow_terminal():
    """80 columns; the class of the devices stands above the table where there is but one."""
    config, console = make_config(ppo()), Console(width=80, file=StringIO())
    problem = problem_of(config, hardware_of(config))
    result = find_plan(problem, "heuristic", 60.0)
    show_calls(console, result.plan, result.price, problem.model)
    shown = text_of(console)
    assert all(name in shown for name in PPO_CALLS)
    assert "…" not in shown
    heads = next(line for line in shown.splitlines() if "devices" in line and "dp" in line)
    assert "class" not in heads
