"""`prefect-rlhf plan`: what it prints and writes, and one sentence with status 2 for every mistake."""

import json
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli import run_command
from planner.measured import MeasuredProfile
from planner.mesh import Cluster
from planner.profile import preset
from planner.profile_cache import cache_file, write_profiles
from planner.sizes import sizes
from planner.timing import Roofline
from rlhf_tasks.config import make_config, manual_assignments
from rlhf_tasks.measurements import Measurements, Timed, TimedExchange
from rlhf_tasks.parallel.shape import ModelShape
from tests.planner.sampled import EXCHANGES, sampled_operations

pytestmark = pytest.mark.timeout(1800)  # the first to evaluate plans compiles that

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
CALLS = {
    "actor_generate",
    "reward_inference",
    "ref_inference",
    "critic_inference",
    "actor_train",
    "critic_train",
}
KEYS = {
    "iteration_time_s",
    "lower_bound_s",
    "gap",
    "proven_optimal",
    "proof_class",
    "device_classes",
    "source",
    "assignments",
    "transfers",
    "peak_memory_bytes",
    "search",
    "corrections",
}
DISJOINT = {
    "actor_generate": {"devices": [0]},
    "reward_inference": {"devices": [1]},
    "ref_inference": {"devices": [0]},
    "critic_inference": {"devices": [1]},
    "actor_train": {"devices": [0]},
    "critic_train": {"devices": [1], "micro_batches": 2},
}


def ppo(**changes: Any) -> dict[str, Any]:
    """A sound configuration for planning on 1x2 that names no file that exists."""
    document = {
        "type": "ppo",
        "models": {"actor": {"config": LLAMA}, "reward": {"config": LLAMA}},
        "data": {"train": "nowhere.jsonl"},
        "output_dir": "nowhere",  # where no profiles are: those in ./runs would change what is planned
        "sampling": {"max_completion_length": 16},
        "batch_size": 8,
        "num_mini_batches": 2,
        "total_iterations": 100,
        "cluster": {"devices_per_host": 2},
        "planning": {"prompt_tokens": 16},
    }
    return {**document, **changes}


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run `plan` on a document; gives (status, standard output, standard error)."""
    monkeypatch.setattr("flows.commands.plans.console.width", 140)

    def run(document: dict[str, Any], *arguments: str) -> tuple[int, str, str]:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
        status = run_command(["plan", "--config", str(tmp_path / "run.yaml"), *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def write(tmp_path: Path):
    """Write a document as YAML; gives its path as text."""

    def make(document: Any, name: str = "file.yaml") -> str:
        (tmp_path / name).write_text(document if isinstance(document, str) else yaml.safe_dump(document))
        return str(tmp_path / name)

    return make


def refused(outcome: tuple[int, str, str], *parts: str) -> None:
    status, out, err = outcome
    assert status == 2, (out, err)
    assert err.count("\n") == 1, err
    assert err.startswith("error: ")
    for part in parts:
        assert part in err, err


@pytest.mark.parametrize("mode", ["search", "heuristic", "symmetric"])
def test_a_plan_is_shown_and_its_figures_are_written(call, tmp_path, mode):
    figures = tmp_path / "figures.json"
    status, out, err = call(
        ppo(), "--mode", mode, "--no-compare", "--time-limit", "2", "--json", str(figures)
    )
    assert status == 0, err
    assert all(name in out for name in CALLS)
    found = json.loads(figures.read_text())
    assert set(found) == KEYS
    assert set(found["assignments"]) == CALLS
    assert 0 < found["lower_bound_s"] <= found["iteration_time_s"]
    assert found["gap"] == pytest.approx(1 - found["lower_bound_s"] / found["iteration_time_s"])
    assert found["search"]["mode"] == mode
    assert set(found["search"]) == {"mode", "seconds", "compile_s", "evaluations"}
    assert (found["search"]["compile_s"] > 0) == (mode == "search") == ("s of compilation" in out)
    for given in found["assignments"].values():
        assert set(given) == {
            *("nodes", "device_classes", "devices", "dp", "tp", "pp", "micro_batches", "offload", "time_s")
        }
        assert given["dp"] * given["tp"] * given["pp"] == len(given["devices"])
        assert given["nodes"] == [0]
    assert found["peak_memory_bytes"].keys() == {"0", "1"}
    assert all(0 < size < 4e9 for size in found["peak_memory_bytes"].values())


def test_the_modes_are_compared_by_hours(call):
    status, out, err = call(ppo(), "--mode", "heuristic", "--time-limit", "1", "--iterations", "7200")
    assert status == 0, err
    assert "Rejected alternatives" in out
    rows = {line.split()[0]: line.split() for line in out.split("7200 iterations")[1].splitlines() if line}
    assert "on devices of their own" in " ".join(rows["disjoint"]), "four roles do not fit two devices"
    for mode in ("search", "mcmc", "heuristic", "symmetric"):
        time_s, hours = float(rows[mode][1]), float(rows[mode][2])
        assert hours == pytest.approx(2 * time_s, rel=0.02), rows[mode]


def test_a_plan_by_hand_is_compared_with_the_modes_and_with_better_places(call, write):
    on_one = {name: {"devices": [0]} for name in DISJOINT}
    status, out, err = call(ppo(), "--evaluate", write(on_one), "--time-limit", "0.5", "--iterations", "7200")
    assert status == 0, err
    alternatives, hours = out.split("Rejected alternatives")[1].split("7200 iterations")
    assert "the other calls may have moved too" in alternatives
    assert "faster by" in alternatives
    assert "The plan is not the best" in alternatives
    assert "takes as long" not in alternatives
    assert "time limits: search 0.5 s, mcmc 0.5 s" in hours
    rows = {line.split()[0]: line.split() for line in hours.splitlines() if line}
    assert float(rows["manual"][1]) > float(rows["search"][1])
    assert rows["manual"][3].startswith("+")


def test_a_search_says_that_the_first_one_compiles(call, monkeypatch):
    told = []

    def status(text: str) -> AbstractContextManager[None]:
        told.append(text)
        return nullcontext()

    monkeypatch.setattr("flows.commands.plans.console.status", status)
    for mode in ("search", "heuristic"):
        assert call(ppo(), "--mode", mode, "--no-compare", "--time-limit", "0.5")[0] == 0
    first, second = told
    assert first.startswith("search, up to 0.5 s; ")
    assert "first time" in first
    assert "a minute" in first
    assert second == "heuristic ...", "it compiles nothing and has no limit"


def test_a_found_plan_is_what_a_run_accepts_and_is_priced_alike(call, tmp_path):
    plan, first, second = (str(tmp_path / name) for name in ("plan.yaml", "first.json", "second.json"))
    status, _, err = call(ppo(), "--mode", "symmetric", "--no-compare", "--json", first, "--out", plan)
    assert status == 0, err
    config = make_config(ppo(plan=plan))
    read = manual_assignments(config)
    assert read is not None
    status, _, err = call(ppo(), "--evaluate", plan, "--no-compare", "--json", second)
    assert status == 0, err
    before, after = (json.loads(Path(path).read_text()) for path in (first, second))
    assert after["search"]["mode"] == "manual"
    for key in ("assignments", "iteration_time_s", "peak_memory_bytes", "transfers"):
        assert before[key] == after[key]
    for name, given in before["assignments"].items():
        assert list(read[name].placement.devices) == given["devices"]
        assert read[name].micro_batches == given["micro_batches"]


def test_a_searched_plan_keeps_its_order_of_calls(call, tmp_path):
    plan, first, second = (str(tmp_path / name) for name in ("plan.yaml", "first.json", "second.json"))
    limit = ("--no-compare", "--time-limit", "1")
    status, _, err = call(ppo(), *limit, "--json", first, "--out", plan)
    assert status == 0, err
    written = yaml.safe_load(Path(plan).read_text())
    assert sorted(given["order"] for given in written.values()) == list(range(6))
    status, _, err = call(ppo(), *limit, "--evaluate", plan, "--json", second)
    assert status == 0, err
    before, after = (json.loads(Path(path).read_text()) for path in (first, second))
    assert before["iteration_time_s"] == after["iteration_time_s"]
    assert list(before["assignments"]) == list(after["assignments"])
    del written["critic_train"]["order"]
    Path(plan).write_text(yaml.safe_dump(written))
    refused(call(ppo(), *limit, "--evaluate", plan), "critic_train has none", "or leave all out")


def test_rewards_in_python_are_no_forward_pass(call, tmp_path):
    times = []
    for planning in ({}, {"reward_seconds_per_sequence": 0.25}):
        document = ppo(
            models={"actor": {"config": LLAMA}},
            rewards=[{"function": "score.py:score"}],
            planning={"prompt_tokens": 16, "device": "cpu-slot", **planning},
        )
        figures = tmp_path / "figures.json"
        status, _, err = call(document, "--mode", "symmetric", "--no-compare", "--json", str(figures))
        assert status == 0, err
        given = json.loads(figures.read_text())["assignments"]["reward_inference"]
        times.append((given["time_s"], given["dp"]))
    (dispatch_s, _), (time_s, dp) = times
    assert dispatch_s == 5e-3
    assert time_s == pytest.approx(dispatch_s + 8 / dp * 0.25)


def test_a_manual_plan_has_its_price_and_its_transfers(call, write, tmp_path):
    figures = tmp_path / "figures.json"
    status, _, err = call(ppo(), "--evaluate", write(DISJOINT), "--no-compare", "--json", str(figures))
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


def test_a_manual_plan_may_offload_a_frozen_model(call, write, tmp_path):
    """Its onload and offload cost their dispatches, and it needs no more memory."""
    resident, offloaded = (tmp_path / name for name in ("resident.json", "offloaded.json"))
    ref = {**DISJOINT["ref_inference"], "offload": True}
    for plan, figures in ((DISJOINT, resident), ({**DISJOINT, "ref_inference": ref}, offloaded)):
        status, out, err = call(ppo(), "--evaluate", write(plan), "--no-compare", "--json", str(figures))
        assert status == 0, err
        row = next(line.split() for line in out.splitlines() if line.split()[:1] == ["ref_inference"])
        assert ("yes" in row) == (figures == offloaded)
    before, after = (json.loads(path.read_text()) for path in (resident, offloaded))
    assert after["assignments"]["ref_inference"]["offload"]
    assert after["iteration_time_s"] >= before["iteration_time_s"]
    device = str(DISJOINT["ref_inference"]["devices"][0])
    assert after["peak_memory_bytes"][device] <= before["peak_memory_bytes"][device]


def test_a_plan_that_does_not_fit_is_priced_and_refused_with_device_and_bytes(call, write):
    small = {"n_hosts": 1, "devices_per_host": 2, "device": {"like": "cpu-slot", "memory_bytes": 2_000_000}}
    status, out, err = call(
        ppo(), "--evaluate", write(DISJOINT, "plan.yaml"), "--cluster", write(small, "cluster.yaml")
    )
    assert "critic_train" in out, "the price is shown nevertheless"
    warning, error = err.splitlines(keepends=True)
    assert "memory_bytes=2e+06 is hardly true" in warning
    refused((status, out, error), "plan.yaml does not fit", "Device ", " lacks ", " bytes", "would lower it")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"actor_trains": {"devices": [0]}}, ("actor_trains", "the calls of ppo are actor_generate")),
        ({"actor_train": {"devices": [0, 1], "dp": 4}}, ("actor_train", "dp=4", "4 devices", "file.yaml")),
        ({"actor_train": {"devices": [2]}}, ("actor_train", "devices 0 to 1")),
        ({"actor_train": {"devices": [0], "offload": True}}, ("actor_train", "offload is for frozen roles")),
        ({"actor_train": {"devices": [0], "tpp": 1}}, ("actor_train.tpp: unknown key",)),
        (
            {"actor_train": {"devices": [0, 1], "dp": 2, "micro_batches": 5000}},
            ("actor_train", "micro_batches=5000", "at most 2 micro-batches"),
        ),
        ({"actor_train": {"devices": [0, 1], "pp": 2}, "critic_train": {"devices": []}}, ("critic_train",)),
    ],
)
def test_a_plan_for_another_graph_or_cluster_is_refused(call, write, change, parts):
    refused(call(ppo(), "--evaluate", write({**DISJOINT, **change})), *parts)


def test_a_plan_that_leaves_a_call_out_is_refused(call, write):
    part = {name: place for name, place in DISJOINT.items() if name != "ref_inference"}
    refused(call(ppo(), "--evaluate", write(part)), "says nothing about ref_inference")


@pytest.mark.parametrize(
    ("cluster", "parts"),
    [
        ({"n_hosts": 0}, ("n_hosts", "greater than 0", "0")),
        ({"devices_per_host": -2}, ("devices_per_host", "-2")),
        ({"device": "h9000"}, ("'h9000'", "a100-80g-sxm, h100-sxm, h200-sxm, cpu-slot")),
        ({"device": {"like": "h100-sxm", "memory_bytes": 0}}, ("memory_bytes", "greater than 0")),
        (
            {"device": {"like": "h100-sxm", "flops": 1e15}},
            ("flops: unknown key, did you mean 'flops_per_s'?",),
        ),
        ({"device": {"name": "mine"}}, ("flops_per_s: required",)),
        ({"between_hosts": {"bytes_per_s": -1}}, ("between_hosts.bytes_per_s", "-1")),
        ({"between_hosts": {"bandwidth": 1}}, ("between_hosts.bandwidth: unknown key",)),
        ({"hosts": 3}, ("hosts: unknown key, did you mean 'n_hosts'?",)),
        ({"device": []}, ("device", "n_hosts=1", "given for 0 hosts")),
        ({"device": [{"n_hosts": 2, "device": "cpu-slot"}]}, ("device: n_hosts=1", "given for 2 hosts")),
        ({"device": [{"n_hosts": 0, "device": "cpu-slot"}]}, ("device.0.n_hosts", "greater than 0")),
        ({"device": [{"n_hosts": 1, "device": "h9000"}]}, ("device.0.device", "'h9000'", "cpu-slot")),
        ({"device": [{"hosts": 1, "device": "cpu-slot"}]}, ("device.0.n_hosts: required",)),
        (
            {"device": [{"n_hosts": 1, "device": {"like": "cpu-slot", "flops_per_s": 0}}]},
            ("device.0.device: flops_per_s", "greater than 0"),
        ),
        (
            {
                "n_hosts": 2,
                "device": [
                    {"n_hosts": 1, "device": "cpu-slot"},
                    {"n_hosts": 1, "device": {"like": "cpu-slot", "memory_bytes": 1e9}},
                ],
            },
            ("both named 'cpu-slot'", "name of its own"),
        ),
        ("n_hosts: 1\n  devices: [", ("file.yaml:2: not valid YAML",)),
    ],
)
def test_a_faulty_cluster_file_is_refused(call, write, cluster, parts):
    sound = {"n_hosts": 1, "devices_per_host": 2, "device": "cpu-slot"}
    document = cluster if isinstance(cluster, str) else {**sound, **cluster}
    refused(call(ppo(), "--cluster", write(document)), *parts)


TWO_CLASSES = {
    "n_hosts": 2,
    "devices_per_host": 2,
    "device": [
        {"n_hosts": 1, "device": {"like": "cpu-slot", "name": "slow", "flops_per_s": 1e10}},
        {"n_hosts": 1, "device": "cpu-slot"},
    ],
}


def test_the_classes_of_devices_are_named(call, write, tmp_path):
    figures = tmp_path / "figures.json"
    part = {name: {"devices": [0, 1, 2, 3], "dp": 4} for name in DISJOINT}
    plan = write({**part, "actor_generate": {"devices": [2]}, "ref_inference": {"devices": [0]}}, "plan.yaml")
    cluster = write(TWO_CLASSES, "cluster.yaml")
    status, out, err = call(
        ppo(), "--cluster", cluster, "--evaluate", plan, "--no-compare", "--json", str(figures)
    )
    assert status == 0, err
    assert "2x2 (hosts 0 slow, 1 cpu-slot)" in out
    row = next(line for line in out.splitlines() if line.lstrip().startswith("critic_inference"))
    assert "slow + cpu-slot" in row
    assert "priced by its slowest" in " ".join(out.split())
    found = json.loads(figures.read_text())
    assert {name: part["nodes"] for name, part in found["device_classes"].items()} == {
        "slow": [0],
        "cpu-slot": [1],
    }
    of = {name: given["device_classes"] for name, given in found["assignments"].items()}
    assert of["actor_generate"] == ["cpu-slot"]
    assert of["ref_inference"] == ["slow"]
    assert of["critic_train"] == ["cpu-slot", "slow"]


def test_classes_of_devices_may_stand_in_the_configuration(call, tmp_path):
    times = []
    for device in ("cpu-slot", [{"n_hosts": 1, "device": "cpu-slot"}, {"n_hosts": 1, "device": "h100-sxm"}]):
        document = ppo(
            planning={"prompt_tokens": 16, "device": device}, cluster={"n_hosts": 2, "devices_per_host": 2}
        )
        figures = tmp_path / "figures.json"
        status, _, err = call(document, "--time-limit", "2", "--no-compare", "--json", str(figures))
        assert status == 0, err
        times.append(json.loads(figures.read_text())["iteration_time_s"])
    assert times[1] < times[0]


def test_a_figure_in_the_wrong_unit_is_warned_about(call, write):
    cluster = {
        "n_hosts": 1,
        "devices_per_host": 2,
        "device": "cpu-slot",
        "between_hosts": {"bytes_per_s": 25},
    }
    status, _, err = call(ppo(), "--cluster", write(cluster), "--mode", "heuristic", "--no-compare")
    assert status == 0
    assert err.startswith("warning: ")
    assert "between_hosts.bytes_per_s=25 is hardly true" in err
    cluster["between_hosts"] = {"bytes_per_s": "2.5e9"}
    status, _, err = call(ppo(), "--cluster", write(cluster), "--mode", "heuristic", "--no-compare")
    assert (status, err) == (0, "")


MEANT_IN_OTHER_UNITS = {
    "like": "a100-80g-sxm",
    "flops_per_s": 312,
    "between_hosts": {"bytes_per_s": 200e9, "latency_s": 15},
}


@pytest.mark.parametrize("place", ["configuration", "configuration by hosts", "cluster file"])
def test_figures_are_judged_wherever_a_device_is_stated(call, write, place):
    """A sentence for each, with the value, where it stands, and the unit that was likely meant."""
    stated = write(MEANT_IN_OTHER_UNITS, "mine.yaml")
    device = stated if place == "configuration" else [{"n_hosts": 1, "device": stated}]
    cluster = {"n_hosts": 1, "devices_per_host": 2, "device": MEANT_IN_OTHER_UNITS}
    given = (
        (ppo(), "--cluster", write(cluster, "mine.yaml"))
        if place == "cluster file"
        else (ppo(planning={"prompt_tokens": 16, "device": device}),)
    )
    status, _, err = call(*given, "--mode", "heuristic", "--no-compare")
    assert status == 0, err
    lines = err.splitlines()
    assert len(lines) == 3
    wrong = (("flops_per_s=312", "3.12e+14"), ("bytes_per_s=2e+11", "2.5e+10"), ("latency_s=15", "1.5e-05"))
    for line, (value, meant) in zip(lines, wrong, strict=True):
        assert line.startswith("warning: ")
        assert "mine.yaml: " in line
        assert value in line
        assert f"write {meant}" in line


def test_a_run_is_warned_too(tmp_path, capsys, write):
    from tests.flows.test_cli import model_folder

    model_folder(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n')
    model = str(tmp_path / "model")
    document = ppo(
        models={"actor": model, "reward": model},
        data={"train": str(tmp_path / "prompts.jsonl")},
        planning={"device": write({**MEANT_IN_OTHER_UNITS, "memory_bytes": 80e9}, "mine.yaml")},
    )
    assert run_command(["config", "validate", write(document, "run.yaml")]) == 0
    assert capsys.readouterr().err.count("is hardly true") == 3


def test_a_cluster_file_takes_the_place_of_the_configurations_cluster(call, write, tmp_path):
    cluster = write("n_hosts: 1\ndevices_per_host: 4\ndevice: {like: cpu-slot, memory_bytes: 8e9}\n")
    figures = tmp_path / "figures.json"
    status, _, err = call(
        ppo(), "--cluster", cluster, "--mode", "heuristic", "--no-compare", "--json", str(figures)
    )
    assert status == 0, err
    assert json.loads(figures.read_text())["peak_memory_bytes"].keys() == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"planning": {"prompt_tokens": 0}}, ("planning.prompt_tokens", "greater than 0")),
        ({"planning": {}}, ("models.actor is an inline config", "planning.prompt_tokens")),
        ({"planning": {"prompt_tokens": 16, "new_tokens": 99}}, ("99 tokens", "max_completion_length is 16")),
        ({"planning": {"prompt_tokens": 16, "new_tokens": {8: 0.5, 16: 0.4}}}, ("add up to 0.9",)),
        ({"planning": {"prompt_tokens": 16, "new_tokens": "many"}}, ("planning.new_tokens", "'many'")),
        ({"planning": {"prompt_tokens": 250}}, ("250 tokens", "16 more", "256 positions", "'actor'")),
        ({"planning": {"prompt_tokens": 16, "device": "tpu"}}, ("'tpu'", "cpu-slot")),
        ({"planning": {"prompt_tokens": 16, "device": "my.yaml"}}, ("my.yaml: no such file",)),
        (
            {"planning": {"prompt_tokens": 16, "device": [{"n_hosts": 3, "device": "cpu-slot"}]}},
            ("planning.device: n_hosts=1", "given for 3 hosts"),
        ),
        (
            {"planning": {"prompt_tokens": 16, "device": [{"n_hosts": 0, "device": "cpu-slot"}]}},
            ("planning.device.0.n_hosts", "greater than 0"),
        ),
        (
            {"planning": {"prompt_tokens": 16, "device": [{"n_hosts": 1, "device": "tpu"}]}},
            ("'tpu'", "cpu-slot"),
        ),
        ({"models": {"actor": {"config": {"model_type": "bert"}}, "reward": "x"}}, ("actor", "bert")),
        ({"models": {"actor": {"config": LLAMA}, "reward": "x"}}, ("role 'critic'", "is not there")),
        ({"models": {"actor": {"configs": LLAMA}}}, ("models.actor.config",)),
        ({"models": {"actor": {"config": {**LLAMA, "hidden_size": -1}}, "reward": "x"}}, ("hidden_size=-1",)),
    ],
)
def test_what_cannot_be_planned_is_refused(call, change, parts):
    refused(call(ppo(**change), "--mode", "heuristic"), *parts)


def test_a_time_limit_of_nothing_is_refused(call):
    refused(call(ppo(), "--time-limit", "0"), "0")


def test_models_that_no_device_holds_are_refused_with_device_and_bytes(call):
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    models = {"actor": {"config": large}, "reward": {"config": large}}
    refused(call(ppo(models=models), "--mode", "heuristic"), " bytes", "would lower it")


def test_lengths_come_from_the_data_where_they_are_not_given(call, tmp_path):
    from tests.flows.test_cli import model_folder

    model_folder(tmp_path / "model")
    rows = [{"prompt": "a" * 20}, {"prompt": "a" * 10}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = ppo(
        models={"actor": str(tmp_path / "model"), "reward": str(tmp_path / "model")},
        data={"train": str(tmp_path / "prompts.jsonl")},
        planning={},
    )
    times = []
    for arguments in ((), ("planning.prompt_tokens=15",), ("planning.prompt_tokens=20",)):
        figures = tmp_path / "figures.json"
        status, _, err = call(
            document, "--mode", "heuristic", "--no-compare", "--json", str(figures), *arguments
        )
        assert status == 0, err
        times.append(json.loads(figures.read_text())["iteration_time_s"])
    assert times[0] == times[1]
    assert times[0] < times[2]


def test_an_output_that_cannot_be_written_is_refused(call, tmp_path):
    refused(
        call(ppo(), "--mode", "heuristic", "--json", str(tmp_path / "no" / "figures.json")),
        "figures.json cannot be written",
    )


def test_inline_models_and_grpo_are_planned_but_not_run(call, tmp_path):
    run = ["run", "ppo", "--config", str(tmp_path / "run.yaml")]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(ppo()))
    assert run_command(run) == 2
    grpo = {key: value for key, value in ppo().items() if key != "type"} | {"type": "grpo"}
    status, out, err = call(grpo, "--mode", "heuristic", "--no-compare")
    assert status == 0, err
    assert "critic" not in out
    assert run_command(["run", "grpo", "--config", str(tmp_path / "run.yaml")]) == 2


def test_planning_loads_neither_torch_nor_prefect(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(ppo()))
    code = (
        "import sys; from flows.cli import run_command; status = run_command(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'prefect', 'prefect_dask', 'distributed', 'matplotlib'}; "
        "print('loaded:', sorted(heavy & sys.modules.keys())); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "plan", "--config", str(tmp_path / "run.yaml")]
    done = subprocess.run([*command, "--mode", "heuristic"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("loaded: []\n"), done.stdout


SHAPE = ModelShape.from_config(LLAMA)


def measured(shape=SHAPE, device="cpu-slot", n_hosts=1, slower=1.0) -> MeasuredProfile:
    """A profile of hosts with two slots that are so much slower than a CPU slot by its figures."""
    roofline = Roofline(preset("cpu-slot"), sizes(shape, "lm", 1), "lm", 1, False, 4)
    operations = [
        Timed(operation=operation, tp=tp, tokens=tokens, context=context, seconds=slower * seconds)
        for tp in (1, 2)
        for operation, tokens, context, seconds in sampled_operations(shape, tp)
    ]
    exchanges = [
        TimedExchange(
            kind=kind,
            ranks=2,
            crosses_hosts=False,
            size_bytes=size_bytes,
            seconds=slower * roofline.exchange_s(kind, 2, size_bytes, False),
        )
        for kind in EXCHANGES
        for size_bytes in (0, 2**24)
    ]
    found = Measurements(operations=tuple(operations), exchanges=tuple(exchanges), process_bytes=10**8)
    return MeasuredProfile.of(device, n_hosts, 2, shape, 4, [found])


def test_it_is_said_whether_figures_were_measured(call, tmp_path):
    figures, elsewhere = tmp_path / "figures.json", tmp_path / "measured.json"
    write_profiles([measured()], elsewhere)
    slot = ppo(planning={"prompt_tokens": 16, "device": "cpu-slot"})
    for arguments, source in (
        ((), "preset of cpu-slot"),
        (("--profile", str(elsewhere)), "measured profile of cpu-slot"),
    ):
        status, out, err = call(
            slot, "--mode", "heuristic", "--no-compare", "--json", str(figures), *arguments
        )
        assert (status, err) == (0, "")
        assert f"Priced by: {source}.\n" in out
        assert json.loads(figures.read_text())["source"] == source


def test_a_run_far_beyond_its_profile_is_warned_about(call, tmp_path):
    profile = tmp_path / "measured.json"
    write_profiles([measured()], profile)
    arguments = ("--mode", "symmetric", "--no-compare", "--profile", str(profile))
    status, _, err = call(ppo(batch_size=1024), *arguments)
    assert status == 0
    assert err.count("\n") == 1
    assert err.startswith("warning: The measured profile of cpu-slot ends at ")
    assert "rows that decode together; actor_generate is priced at " in err


def planned_s(call, document, figures, *arguments) -> float:
    """The time of an iteration under the heuristic's plan."""
    status, _, err = call(document, "--mode", "heuristic", "--no-compare", "--json", str(figures), *arguments)
    assert status == 0, err
    return json.loads(figures.read_text())["iteration_time_s"]


def test_a_profile_from_elsewhere_is_gone_by_as_one_measured_here_is(call, tmp_path):
    figures, elsewhere = tmp_path / "figures.json", tmp_path / "measured.json"
    document = ppo(output_dir=str(tmp_path / "runs"))
    write_profiles([measured(slower=20)], elsewhere)
    without = planned_s(call, document, figures)
    by_profile = planned_s(call, document, figures, "--profile", str(elsewhere))
    assert by_profile > 5 * without
    here = cache_file(tmp_path / "runs" / "profiles", "cpu-slot", Cluster(1, 2), SHAPE, 4)
    here.parent.mkdir(parents=True)
    elsewhere.rename(here)
    assert planned_s(call, document, figures) == by_profile
    write_profiles([measured()], elsewhere)
    assert planned_s(call, document, figures, "--profile", str(elsewhere)) < by_profile, "the file goes first"


@pytest.mark.parametrize(
    ("profiles", "parts"),
    [
        ([measured(ModelShape.from_config({**LLAMA, "hidden_size": 32}))], ("another model", "hidden 32")),
        ([measured(device="h100-sxm")], ("a profile of h100-sxm; the cluster has cpu-slot", "measured.json")),
        ([measured(n_hosts=2)], ("measured on 2x2 cpu-slot; the cluster has 1x2", "measured.json")),
        ([], ("measured.json has no profile",)),
        (None, ("measured.json is no profile", "No such file")),
    ],
    ids=["model", "device", "cluster", "empty", "missing"],
)
def test_a_profile_that_does_not_fit_is_refused(call, tmp_path, profiles, parts):
    path = tmp_path / "measured.json"
    if profiles is not None:
        write_profiles(profiles, path)
    refused(call(ppo(), "--profile", str(path)), *parts)
