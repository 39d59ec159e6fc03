"""PPO from a configuration to its summary, as the demo runs it: the demo's own plan on four ranks, all six calls."""

import asyncio
import json
import logging
import re
from base64 import b64decode
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterName,
)
from transformers import AutoModelForCausalLM

from prefect_rlhf import deployments
from prefect_rlhf.flows.algorithms import rollout
from prefect_rlhf.flows.cluster.this_machine import device_here
from prefect_rlhf.flows.ppo import rlhf_ppo
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.progress import RunView
from prefect_rlhf.flows.run.summary import read_jsonl
from prefect_rlhf.flows.run.training import cluster_of
from prefect_rlhf.flows.view import prefect_api
from prefect_rlhf.planner.text import short_names
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.protocol.messages import Cause, Enterable, Faulted, IterationRan
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from prefect_rlhf.rlhf_tasks.user_code.rewards import read_samples
from tests.flows.events import wait_events
from tests.flows.tracked import in_event_files
from tests.markdown import table_of
from tests.ppo_calls import PPO_CALLS
from tests.rlhf_tasks.plans import small_plan
from tests.tiny_runs import ppo_config, write_prompts

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
]
ITERATIONS = 4
METRICS = {
    *("reward", "reward_std", "rewards/length_reward/mean", "kl", "entropy", "clip_ratio"),
    *("completions/mean_length", "throughput/tokens_per_s", "mfu"),
}
"""Names under which users know what a run of PPO tells."""
PLAN = Path(deployments.__file__).with_name("demo_plan.yaml")


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory):
    """(summary, run folder, completions of the trained model by the engine)."""
    base = tmp_path_factory.mktemp("run")
    place = {"address": cluster.scheduler_address, "devices_per_host": 4}
    changes = {"total_iterations": ITERATIONS, "batch_size": 64, "report_to": ["tensorboard"]}
    config = ppo_config(base, name="tiny", plan=str(PLAN), cluster=place, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            prefect_api, "ANSWER_S", 60.0
        )  # a busy server may need longer than a run would wait for it
        summary = asyncio.run(rlhf_ppo(config))
    write_prompts(base / "held-out.jsonl", 8)
    greedy = make_config(
        {
            "type": "rollout",
            "name": "greedy",
            "models": {"actor": summary["model"]},
            "data": {"train": str(base / "held-out.jsonl")},
            "output_dir": str(base / "runs"),
            "sampling": {"max_completion_length": 8, "temperature": 0},
            "batch_size": 8,
            "cluster": place,
        }
    )
    asyncio.run(rollout(greedy))
    return summary, base / "runs" / "tiny", list(read_samples(base / "runs" / "greedy", 8))


def test_the_summary_tells_what_each_call_did(finished):
    summary, folder, _ = finished
    assert summary == json.loads((folder / "summary.json").read_text())
    assert summary["iterations"] == ITERATIONS
    assert set(summary["calls"]) == set(PPO_CALLS)
    assert summary["calls"]["actor_train"]["dp"] == 2
    assert summary["calls"]["actor_generate"]["tp"] == 2
    assert summary["bytes_reallocated"] > 0
    assert summary["bytes_redistributed"] > 0
    told = summary["planned_and_measured"]
    assert told["calls"].keys() == summary["calls"].keys()
    assert told["iteration"]["planned"] > 0 < told["iteration"]["measured"]
    assert told["call_memory_bytes"].keys() == summary["calls"].keys()
    assert all(pair["measured"] > 100e6 < pair["planned"] for pair in told["call_memory_bytes"].values())
    assert told["peak_memory_bytes"].keys() == {"0", "1", "2", "3"}
    assert all(pair["measured"] > 100e6 for pair in told["peak_memory_bytes"].values())
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert [row["iteration"] for row in metrics] == list(range(ITERATIONS))
    assert metrics[-1]["policy/mismatch"] < 1e-5  # generation and training layouts score alike
    assert metrics[-1].keys() >= {*METRICS, *(f"time/{name}" for name in summary["calls"])}
    assert all(0 < row["mfu"] < 1 for row in metrics)
    work = {row["node"] for row in read_jsonl(folder / "lineage.jsonl") if row["flops"] > 0}
    assert work == set(summary["calls"]), "models compute in calls, and in nothing else"


def test_a_finished_run_leaves_its_report(finished):
    summary, folder, _ = finished
    page = (folder / "report.html").read_text()
    for shown in (f"{ITERATIONS} of {ITERATIONS}", "It has finished.", "One iteration as it was planned"):
        assert shown in page
    assert page.count("<svg") > 10
    assert summary["planned_lanes"].keys() >= {"0-1"}, "by devices"


def test_a_tracker_has_what_the_journal_has(finished):
    _, folder, _ = finished
    journal = [
        (name, row["iteration"] + 1, pytest.approx(value, rel=1e-6))
        for row in read_jsonl(folder / "metrics.jsonl")
        for name, value in row.items()
        if value is not None
    ]
    assert in_event_files(folder / "tensorboard") == journal


def test_plain_transformers_answers_as_the_engine_does(finished):
    summary, _, samples = finished
    model = AutoModelForCausalLM.from_pretrained(summary["model"])
    tokenizer = Tokenizer.from_folder(summary["model"])
    for sample in samples:
        prompt = torch.tensor([tokenizer.encode(sample["prompt"])])
        answer = model.generate(
            prompt, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_id, pad_token_id=0
        )
        assert tokenizer.decode(answer[0, prompt.shape[1] :].tolist()) == sample["completion"]


async def latest_artifacts(flow_run_name):
    """Key -> content of the newest artifact of that key which a flow run has made."""
    named = FlowRunFilter(name=FlowRunFilterName(any_=[flow_run_name]))
    async with get_client() as client:
        [run] = await client.read_flow_runs(flow_run_filter=named)
        made = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        artifacts = await client.read_artifacts(artifact_filter=made)
    artifacts.sort(key=lambda artifact: artifact.created)
    return {artifact.key: artifact.data for artifact in artifacts}


def bars_of(markdown):
    """Number of bars, boxes or points of the one picture in a markdown text."""
    [encoded] = re.findall(r"\(data:image/svg\+xml;base64,([^)]+)\)", markdown)
    drawn = ElementTree.fromstring(b64decode(encoded))
    return len(drawn.findall(".//{*}rect") + drawn.findall(".//{*}circle"))


def test_the_ui_shows_plan_curves_timeline_completions_and_progress(finished, prefect):
    summary, folder, _ = finished
    shown = asyncio.run(latest_artifacts("ppo/tiny"))
    assert set(shown) == {
        "execution-plan",
        "curves",
        "device-timeline",
        "completions",
        "progress",
        "planned-and-measured",
    }
    plan = ExecutionPlan.model_validate_json((folder / "plan.json").read_text())
    assert len(plan.nodes) > len(summary["calls"]), "the plan has transfers and reallocations too"
    assert [row["node"] for row in table_of(shown["execution-plan"])] == list(short_names(plan).values())
    assert f"After {ITERATIONS} iterations" in shown["curves"]
    assert f"iterations {ITERATIONS - 2} to {ITERATIONS}" in shown["device-timeline"]
    assert bars_of(shown["execution-plan"]) > 10, "the picture is empty"
    assert bars_of(shown["curves"]) > 10, "the picture is empty"
    assert bars_of(shown["device-timeline"]) > 10, "the picture is empty"
    samples = read_jsonl(folder / "samples" / f"{ITERATIONS - 1:08d}-0000.jsonl")
    scores = table_of(shown["completions"].partition("###")[0])
    assert [float(row["score"]) for row in scores] == pytest.approx(
        [row["score"] for row in samples], rel=1e-3
    )
    assert all(
        float(row["length_reward"]) == row_of["rewards"]["length_reward"]
        for row, row_of in zip(scores, samples, strict=True)
    )
    assert shown["progress"] == 100.0
    told = [(row["what"], row["unit"]) for row in table_of(shown["planned-and-measured"])]
    assert told == [
        ("iteration", "s"),
        *((name, "s") for name in summary["calls"]),
        *((f"memory in {name}", "MB") for name in summary["calls"]),
        *((f"memory of device {rank}", "MB") for rank in range(4)),
    ]


def test_the_flow_run_has_the_tags_of_its_run(finished, prefect):
    async def tags():
        named = FlowRunFilter(name=FlowRunFilterName(any_=["ppo/tiny"]))
        async with get_client() as client:
            [run] = await client.read_flow_runs(flow_run_filter=named)
        return set(run.tags)

    assert {"algo:ppo", "model:actor", "plan:manual"} <= asyncio.run(tags())


def test_every_commit_is_an_event_that_automations_can_hang_on(finished, prefect):
    told = wait_events("tiny", ITERATIONS)
    rows = read_jsonl(finished[1] / "metrics.jsonl")
    for event, row in zip(told, rows, strict=True):
        step = row["iteration"] + 1
        assert event.payload == {"run": "tiny", "iteration": step - 1, "step": step, "metrics": row}


def test_the_model_folder_has_its_card(finished):
    card = (Path(finished[0]["model"]) / "README.md").read_text()
    assert "# tiny" in card
    assert "| reward |" in card


def test_a_complete_iteration_shows_before_its_commit(tmp_path, monkeypatch, capsys, expected):
    monkeypatch.setattr("prefect_rlhf.flows.run.progress.get_run_logger", lambda: logging.getLogger("test"))
    prepared = replace(prepare(ppo_config(tmp_path)), plan=small_plan(), iterations=9)
    view = RunView(prepared, tmp_path, expected.peak_flops_per_s)
    metrics = {"reward": 3.0, "rewards/brevity/mean": 2.0, "time/iteration": 1.5}
    for event in (
        Enterable(iteration=3, generation=0),
        IterationRan(iteration=3, generation=0, metrics=metrics),
        Faulted(generation=0, cause=Cause("lost", (1,))),
    ):
        view.on_event(event)
    *_, line, fault = capsys.readouterr().out.splitlines()
    assert "iteration 4 of 9, 1.50 s, 0:00:08 left, reward 3.000, rewards/brevity/mean 2.000" in line
    assert "rank 1: lost" in fault


@pytest.mark.parametrize(("device", "checked"), [(None, device_here(2).name), ("h100-sxm", None)])
def test_devices_are_checked_against_the_plan_where_nobody_named_them(tmp_path, monkeypatch, device, checked):
    """A cluster by address is not looked at before the plan is made: its devices are taken for this machine's."""
    asked = []

    @contextmanager
    def found(address, n_ranks, *, assumed, needs, **_):
        asked.append((assumed and assumed.name, needs))
        yield None

    monkeypatch.setattr("prefect_rlhf.flows.run.training.found_cluster", found)
    place = {"address": "tcp://127.0.0.1:1", "devices_per_host": 2}
    config = ppo_config(tmp_path, cluster=place, planning={"device": device})
    with cluster_of(config, tmp_path, {0: 5.0}):
        assert asked == [(checked, {0: 5.0})]
