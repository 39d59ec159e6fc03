"""A run of which every process was killed continues by its command, to the very bits of an undisturbed run."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder
from prefect_rlhf.rlhf_tasks.system.counter_random import counter_bits
from tests.committed import assert_same_run, generations_of, last_step, metrics_of
from tests.flows.cluster.test_server import names_of_runs
from tests.flows.commands.test_folders import opened_ui
from tests.flows.marked_command import MarkedCommand
from tests.tiny_models import OF_FAMILY
from tests.tiny_runs import TWO_RANKS, ppo_config, write_model
from tests.tiny_tools import write_conversations, write_tool_model

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1800)]
ITERATIONS = 12
REWARD_OF_CALLS = Path(__file__).parents[1] / "tiny_tools.py"
DONE = 2  # of them are committed when the run is killed


def begin(base: Path, name: str, iterations: int = ITERATIONS, **changes: Any) -> tuple[list[str], Path]:
    """The command line of a new run and its folder. The roles have state of their own besides weights, and the
    reference follows the actor."""
    config = ppo_config(
        base,
        name=name,
        plan=TWO_RANKS,
        cluster={"devices_per_host": 2},
        total_iterations=iterations,
        kl_target=0.1,
        kl_horizon=64,
        sync_ref_model=True,
        ref_model_sync_steps=3,
        **changes,
    )
    return command_of(base, config.model_dump(mode="json")), base / "runs" / name


def begin_grpo(base: Path, name: str, both: str = "0-1 d2", **changes: Any) -> tuple[list[str], Path]:
    """The same for GRPO with adapters, on two ranks: generation has a copy of them, the reference none.

    both  where all is computed but the responses
    """
    ppo = ppo_config(base).model_dump(mode="json")
    shared = {
        key: ppo[key]
        for key in ("data", "sampling", "rewards", "output_dir", "batch_size", "optimizer", "snapshot_every")
    }
    document = {
        "type": "grpo",
        "name": name,
        "models": {"actor": ppo["models"]["actor"]},
        **shared,
        "num_generations": 4,
        "num_mini_batches": 2,
        "beta": 0.05,
        "total_iterations": ITERATIONS,
        "lora": {"rank": 4, "alpha": 8.0},
        "cluster": {"devices_per_host": 2},
        "plan": {
            "actor_generate": "0-1 t2",
            "reward_inference": both,
            "ref_inference": both,
            "actor_train": both,
        },
        **changes,
    }
    return command_of(base, document), base / "runs" / name


ROUNDS_REWARD = """
from zlib import crc32
def judge(completions, answer, **columns):
    return [1.0 if int(a) < 3 else crc32(c.encode()) / 2**32 for c, a in zip(completions, answer)]
"""
"""Three prompts of seven have a group of equal scores."""


def begin_dapo(base: Path, name: str) -> tuple[list[str], Path]:
    """The same for DAPO in up to two rounds, generated on one rank and scored on the other."""
    ppo = ppo_config(base).model_dump(mode="json")
    shared = {key: ppo[key] for key in ("data", "sampling", "output_dir", "optimizer", "snapshot_every")}
    (base / "rounds.py").write_text(ROUNDS_REWARD)
    document = {
        "type": "dapo",
        "name": name,
        "models": {"actor": ppo["models"]["actor"]},
        **shared,
        "rewards": [{"function": f"{base / 'rounds.py'}:judge"}],
        "batch_size": 8,
        "num_generations": 4,
        "beta": 0.05,
        "total_iterations": ITERATIONS,
        "cluster": {"devices_per_host": 2},
        "plan": {
            "actor_generate": "0",
            "reward_inference": "1",
            "ref_inference": "1",
            "actor_train": "0-1 d2",
        },
    }
    return command_of(base, document), base / "runs" / name


TOOL = '''
import os

def add(a: int, b: int, *, log: str) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
        log: A file for each attempt's calls, a line each.
    """
    with open(f"{log}.{os.environ['MARK']}", "a") as lines:
        lines.write(f"{a} + {b}\\n")
    return a + b
'''


def begin_tools(base: Path, name: str) -> tuple[list[str], Path]:
    """The same for GRPO whose model calls a tool, in up to three turns."""
    if not (base / "tool.py").exists():
        (base / "tool.py").write_text(TOOL)
        write_tool_model(base / "caller")
        write_conversations(base / "conversations.jsonl")
    return begin_grpo(
        base,
        name,
        lora=None,
        models={"actor": str(base / "caller")},
        data={"train": str(base / "conversations.jsonl")},
        tools=[{"function": f"{base / 'tool.py'}:add", "kwargs": {"log": str(base / f"{name}.calls")}}],
        environment={"max_turns": 3, "max_turn_tokens": 6},
        sampling={"max_completion_length": 160},
        rewards=[{"function": f"{REWARD_OF_CALLS}:answer_reward"}],
    )


AGENT = f"""
import sys
sys.path.insert(0, {str(REWARD_OF_CALLS.parent)!r})
from tiny_agent import *
with open(sys.argv[1] + "." + os.environ["MARK"], "a") as lines:
    lines.write(str(SEED) + "\\n")
echo(json.loads(sys.stdin.readline()), 0)
"""
"""It leaves its seed in a file for each attempt: the seed says which iteration and sample it plays."""


def begin_agent(base: Path, name: str) -> tuple[list[str], Path]:
    """The same for GRPO whose responses are episodes of an agent."""
    (base / "agent.py").write_text(AGENT)
    return begin_grpo(
        base,
        name,
        lora=None,
        rewards=[],
        agent={"command": f"{sys.executable} {base / 'agent.py'} {base / 'played'}"},
        sampling={"max_completion_length": 30},
        total_iterations=6,
    )


def seeds_of(iterations: Iterable[int], n: int = 16) -> list[int]:
    """The seeds of the agents that play some iterations of n samples."""
    none = torch.zeros(1, dtype=torch.int64)
    return [
        seed
        for i in iterations
        for seed in counter_bits(0, "agent/rollout", i, torch.arange(i * n, (i + 1) * n), none).tolist()
    ]


def command_of(base: Path, document: dict[str, Any]) -> list[str]:
    """The command line of a new run, whose configuration is written to a file."""
    file = base / f"{document['name']}.yaml"
    file.write_text(yaml.safe_dump(document))
    return ["run", document["type"], "--config", str(file)]


def finish(log: Path, command: list[str]) -> None:
    """Carry out a command to its good end."""
    with MarkedCommand(log, *command) as run:
        assert run.process.wait(900) == 0, run.output
        run.assert_gone()


def killed_and_resumed(base: Path, begin: Callable[[Path, str], tuple[list[str], Path]]) -> tuple[Path, Path]:
    """(folder, undisturbed folder) of a run that was killed midway and has continued to its end: the same bits."""
    command, undisturbed = begin(base, "undisturbed")
    finish(base / "undisturbed.log", command)
    command, folder = begin(base, "killed")
    with MarkedCommand(base / "killed.log", *command) as run:
        run.wait_until(step_folder(folder, DONE).exists)
        os.killpg(run.process.pid, signal.SIGKILL)
        assert run.process.wait(60) == -signal.SIGKILL
        run.assert_gone()
    step = last_step(folder)
    assert DONE <= step < ITERATIONS, "it was not killed midway"
    assert not (folder / "summary.json").exists()

    finish(base / "again.log", [*command[:2], "--resume", str(folder)])
    assert generations_of(folder) == {i: (1 if i < step else 2, 0) for i in range(ITERATIONS)}
    assert_same_run(folder, undisturbed)
    return folder, undisturbed


@pytest.mark.whole
def test_a_run_that_is_killed_as_a_whole_goes_on_to_the_same_bits(tmp_path):
    folder, undisturbed = killed_and_resumed(tmp_path, begin)
    weights = Path("model") / "model.safetensors"
    assert (folder / weights).read_bytes() == (undisturbed / weights).read_bytes()
    with opened_ui(folder, tmp_path / "ui.log") as (address, login):
        names = names_of_runs(f"{address}/api", login)
    repeated = {i + 1 for i, (attempt, _) in generations_of(folder).items() if attempt == 2}
    log = (tmp_path / "again.log").read_text()
    assert repeated <= shown_iterations(names), f"an iteration is a flow run, or a part of one\n{log}"
    assert len(names) - sum(name.startswith("it-") for name in names) == 2, "each attempt is one"


def shown_iterations(names: Iterable[str]) -> set[int]:
    """The iterations of subflows, from 1; `it-00004..00006` stands for three."""
    spans = [re.findall(r"\d{5}", name) for name in names if name.startswith("it-")]
    return {i for span in spans for i in range(int(span[0]), int(span[-1]) + 1)}


def test_so_does_grpo_that_trains_adapters_and_it_exports_them(tmp_path):
    folder, undisturbed = killed_and_resumed(tmp_path, begin_grpo)
    written = {path.name for path in (folder / "model").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= written
    assert not {"model.safetensors", "config.json"} & written
    adapters = Path("model") / "adapter_model.safetensors"
    assert (folder / adapters).read_bytes() == (undisturbed / adapters).read_bytes()
    with MarkedCommand(
        tmp_path / "export.log", "export", str(folder), str(tmp_path / "out"), "--merged"
    ) as run:
        assert run.process.wait(300) == 0, run.output
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("both", ["0-1 d2 sharded", "0-1 c2", "0-1 c2 sharded"])
def test_so_does_grpo_whose_weights_or_tokens_are_divided(tmp_path, both: str):
    folder, undisturbed = killed_and_resumed(tmp_path, partial(begin_grpo, both=both, lora=None))
    weights = Path("model") / "model.safetensors"
    assert (folder / weights).read_bytes() == (undisturbed / weights).read_bytes()


def test_so_does_grpo_of_gemma_4(tmp_path):
    ppo_config(tmp_path)
    sizes = {**OF_FAMILY["gemma4_text"], "num_hidden_layers": 4, "vocab_size_per_layer_input": 260}
    write_model(tmp_path / "actor", family="gemma4_text", **sizes)
    folder, undisturbed = killed_and_resumed(tmp_path, partial(begin_grpo, lora=None))
    weights = Path("model") / "model.safetensors"
    assert (folder / weights).read_bytes() == (undisturbed / weights).read_bytes()


def test_so_does_dapo_whose_rounds_go_by_the_scores(tmp_path):
    folder, _ = killed_and_resumed(tmp_path, begin_dapo)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["groups/rounds"] for line in lines} == {1.0, 2.0}
    assert {line["groups/kept"] for line in lines} <= {0.0, 1.0, 2.0}
    assert all("reward" in line and "completions/mean_length" in line for line in lines)


def test_so_does_grpo_whose_model_calls_tools_and_no_call_of_a_commit_is_made_again(tmp_path):
    folder, _ = killed_and_resumed(tmp_path, begin_tools)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    n_calls = [round(16 * (line["tools/calls"] - line["tools/malformed"])) for line in lines]
    logs = sorted(tmp_path.glob("*.calls.*"), key=lambda path: path.stat().st_mtime_ns)
    made, _, made_again = (path.read_text().splitlines() for path in logs)
    assert len(made) == sum(n_calls)
    again = sum(n for i, n in enumerate(n_calls) if generations_of(folder)[i][0] == 2)
    assert again > 0
    assert sorted(made_again) == sorted(made[-again:])


def test_a_run_of_an_agent_that_is_killed_keeps_what_is_committed_and_asks_for_none_of_it_again(tmp_path):
    """Bits are not promised. What was not committed when it died is asked for again, whole iterations of it."""
    command, folder = begin_agent(tmp_path, "killed")
    with MarkedCommand(tmp_path / "killed.log", *command) as run:
        run.wait_until(step_folder(folder, DONE).exists)
        os.killpg(run.process.pid, signal.SIGKILL)
        assert run.process.wait(60) == -signal.SIGKILL
        run.assert_gone()
    step, committed = last_step(folder), metrics_of(folder)
    assert DONE <= step < 6, "it was not killed midway"
    finish(tmp_path / "again.log", [*command[:2], "--resume", str(folder)])
    assert metrics_of(folder)[:step] == committed[:step]
    assert generations_of(folder) == {i: (1 if i < step else 2, 0) for i in range(6)}
    logs = sorted(tmp_path.glob("played.*"), key=lambda path: path.stat().st_mtime_ns)
    first, second = ([int(line) for line in path.read_text().split()] for path in logs)
    assert set(seeds_of(range(step))) <= set(first)
    assert sorted(second) == sorted(seeds_of(range(step, 6)))


def test_a_reward_that_hangs_in_a_regular_expression_dies_with_a_killed_flow_process(tmp_path):
    """It holds the interpreter: no thread and no signal handler of its process can end it."""
    hangs = tmp_path / "hangs"
    (tmp_path / "endless.py").write_text(
        "import pathlib, re\n"
        "def match(completions, **columns):\n"
        f"    pathlib.Path({str(hangs)!r}).touch()\n"
        "    return [re.match('(a+)+b', 'a' * 90) for _ in completions]\n"
    )
    rewards = [{"function": f"{tmp_path / 'endless.py'}:match"}]
    command, _ = begin(tmp_path, "hung", rewards=rewards, reward_timeout_s=600.0)
    with MarkedCommand(tmp_path / "log", *command) as run:
        run.wait_until(hangs.exists)
        assert any("reward" in line for line in run.alive())
        run.signal(signal.SIGKILL)
        assert run.process.wait(60) == -signal.SIGKILL
        run.assert_gone()


@pytest.mark.whole
def test_no_process_of_a_killed_flow_process_is_left_though_somebody_had_stopped_all(tmp_path):
    """Prefect's server, the fork server and its forks, the processes of rewards and of a tracker, their keepers."""
    command, folder = begin(tmp_path, "stopped", 10_000, report_to=["tensorboard"])
    with MarkedCommand(tmp_path / "log", *command) as run:
        run.wait_until(step_folder(folder, DONE).exists)
        below = psutil.Process(run.process.pid).children(recursive=True)
        commands = " ".join(" ".join(process.cmdline()) for process in below)
        kinds = ("server_process", "forkserver", "track_resources", "user_code", "trackers")
        assert [kind for kind in kinds if kind not in commands] == []
        for process in below:
            process.suspend()
        run.signal(signal.SIGKILL)
        assert run.process.wait(60) == -signal.SIGKILL
        _, left = psutil.wait_procs(below, timeout=60)
        for process in left:
            process.kill()
        assert left == []
        run.assert_gone()
