"""The commands that pages print are carried out, in a page's order, in a folder with the files that pages name.

Models and rows are tiny, ids lead to a Hub on loopback, and runs are shortened (`shortened`). What cannot run here
stands in ELSEWHERE. tests/test_code_blocks.py reads every command by its program's parser.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.loopback_hub import WRITER, Hub
from tests.test_code_blocks import BLOCKS, Block, commands_in
from tests.tiny_runs import write_model, write_prompts

ROOT = Path(__file__).parents[1]
LIMIT_S = 400.0

ELSEWHERE = {
    "make": "what continuous integration and newcomers call",
    "pip": "tests/check_wheel.sh installs the wheel and its extras",
    ".venv/bin/python -m pytest": "tests are not run by tests",
    "source .venv/bin/activate": "a shell's own",
    "python -m prefect_rlhf.deployments.examples.smollm2": "needs weights of 93 MB",
    "prefect-rlhf run grpo --config deployments/examples/smollm2-grpo.yaml": "the same",
    "prefect-rlhf run evaluate --config deployments/examples/smollm2-evaluate.yaml": "the same",
    "prefect-rlhf demo": "tests/flows/test_pipeline.py and others run its stages",
    "prefect-rlhf setup": "downloads vLLM, 2 GB",
    "prefect-rlhf replay": "needs an anomaly: tests/flows/commands/test_replays.py",
    "prefect": "tests/deployments/deployed.py: server, work pool, deployments, worker, automation",
    "export": "tests/flows/two_hosts.py has these variables",
    "for": "the same",
    "done": "the same",
    "vllm": "tests/rlhf_tasks/parallel/generate has a server like it",
    "dask": "tests/flows/test_two_hosts.py: scheduler and workers",
    "prefect-rlhf run ppo --config ppo.yaml cluster.address": "tests/flows/test_two_hosts.py: the run",
    "prefect-rlhf run ppo --config /shared/ppo.yaml": "Kubernetes",
}
"""The beginning of a command -> who carries it out, or why nobody does."""
FOLLOWED = {"docs/tutorial.md"}
"""Pages that a test of their own follows."""
SLOW = {"run", "doctor", "profile", "generate", "chat", "export", "ui", "python", "pause", "plan", "rehearse"}
"""Commands that load a model, search a plan, or start ranks or servers."""
LONG = {
    f"docs/how-to/{name}.md"
    for name in ("agents", "check-a-model", "pause", "plan", "recurring", "results", "resume", "several-gpus")
}
"""Pages whose commands take minutes: not in continuous integration."""
FINISHED = ("a", "b", "NAME")
"""Runs that pages name: copies of the run `sums`."""

GRPO = {
    "type": "grpo",
    "models": {"actor": "model"},
    "data": {"train": "data/train.jsonl"},
    "sampling": {"max_completion_length": 8},
    "rewards": [{"function": "rewards.py:correct"}],
    "num_generations": 4,
    "batch_size": 16,
    "total_iterations": 2,
    "lora": {"rank": 4},
    "snapshot_every": 1,
}
REWARD = "def correct(completions, **_):\n    return [len(str(each)) / 9 for each in completions]\n"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CARD = "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: train.jsonl}\n---\n"


def carried_out_elsewhere(words: list[str]) -> bool:
    return any(begins(words, beginning) for beginning in ELSEWHERE)


def begins(words: list[str], beginning: str) -> bool:
    """Whether a command has these words first; of the last one, a beginning of several."""
    *whole, last = beginning.split()
    return words[: len(whole)] == whole and (
        words[len(whole)] == last if not whole else words[len(whole)].startswith(last)
    )


class Printed(NamedTuple):
    """The commands of a page that are carried out here."""

    page: str
    commands: list[list[str]]

    @property
    def is_slow(self) -> bool:
        return any({words[0], *words[1:2]} & SLOW or words[1:2] == ["report"] for words in self.commands)


def printed() -> Iterator[Printed]:
    for page in dict.fromkeys(block.page for block in BLOCKS):
        if page in FOLLOWED:
            continue
        blocks = [
            block
            for block in BLOCKS
            if block.page == page and block.language == "sh" and "norun" not in block.marks
        ]
        commands = [words for block in blocks for words in commands_in(block.text)]
        if here := [words for words in commands if not carried_out_elsewhere(words)]:
            yield Printed(page, here)


PAGES = list(printed())


def shortened(text: str) -> str:
    """A configuration or command that takes seconds, on names that exist."""
    text = re.sub(r"\b(total_iterations(?:: |=))\d+", r"\g<1>3", text)
    text = re.sub(r"\b(max_completion_length: )\d+", r"\g<1>8", text)
    text = re.sub(r"\b(every: )\d+", r"\g<1>3", text)
    text = re.sub(r"\b(rank: )\d+", r"\g<1>4", text)
    text = text.replace("ORG/NAME", "org/name").replace("/shared/rlhf/ppo.yaml", "ppo.yaml")
    return re.sub(r"\bFILE\b", "grpo.yaml", text)


@pytest.fixture(scope="session")
def printed_hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture(scope="session")
def named_files(printed_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that pages name."""
    folder = tmp_path_factory.mktemp("printed")
    for name in ("model", "models/mine", "models/base", "models/my-model"):
        write_model(folder / name)
        tokenizer = folder / name / "tokenizer_config.json"
        tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "chat_template": TEMPLATE}))
    (folder / "data" / "support").mkdir(parents=True)
    rows = write_prompts(folder / "data" / "train.jsonl").read_text()
    for name in ("data/prompts.jsonl", "data/held_out.jsonl", "rows.jsonl", "test.jsonl", "train.jsonl"):
        (folder / name).write_text(rows)
    examples = [{"prompt": f"{i} ", "completion": "ab", "chosen": "ab", "rejected": "b"} for i in range(64)]
    for name in ("data/answers.jsonl", "data/pairs.jsonl", "data/support/may.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in examples))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "grpo.yaml").write_text(yaml.safe_dump(GRPO))
    ppo = {**GRPO, "type": "ppo"}
    del ppo["num_generations"], ppo["lora"]
    (folder / "ppo.yaml").write_text(yaml.safe_dump(ppo))
    (folder / "deployments" / "examples").mkdir(parents=True)
    agent = ROOT / "deployments" / "examples" / "guessing_agent.py"
    shutil.copy(agent, folder / "deployments" / "examples")
    for example in (ROOT / "deployments" / "examples").glob("*.yaml"):
        text = example.read_text()
        is_planned_only = example.name.startswith("plan-")
        (folder / "deployments" / "examples" / example.name).write_text(
            text if is_planned_only else shortened(text)
        )
    write_model(folder / "small", family="qwen3", head_dim=8)
    shutil.copy(folder / "model" / "tokenizer_config.json", folder / "small")
    printed_hub.add_folder("Qwen/Qwen3-0.6B", folder / "small")
    questions = rows.replace('"prompt"', '"question"')
    printed_hub.add("openai/gsm8k", {"README.md": CARD, "train.jsonl": questions}, "dataset")
    return folder


@pytest.fixture(scope="session")
def finished_runs(printed_hub: Hub, named_files: Path) -> Path:
    """The same, after a run whose folder has the names of pages."""
    Shell(named_files, printed_hub).run(["prefect-rlhf", "run", "grpo", "--config", "grpo.yaml", "name=sums"])
    for name in FINISHED:
        shutil.copytree(named_files / "runs" / "sums", named_files / "runs" / name, symlinks=True)
    return named_files


class Shell:
    """Commands in a folder."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        threads = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.environment = {**kept, **hub.environment(folder / "hub", WRITER), **threads, "PATH": path}
        self.live: subprocess.Popen[str] | None = None

    def run(self, words: list[str]) -> None:
        """Carry out one command. AssertionError with what it has printed unless its status is 0."""
        carry_out = SPECIAL.get(" ".join(words[:2]), Shell.plainly)
        carry_out(self, words)

    def plainly(self, words: list[str], said: str = "") -> None:
        ended = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            input=said,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert ended.returncode == 0, f"{shlex.join(words)}\n{ended.stdout}\n{ended.stderr}"

    def chat(self, words: list[str]) -> None:
        self.plainly(words, said="hello\n")

    def init(self, words: list[str]) -> None:
        """It overwrites nothing."""
        (self.folder / "rewards.py").unlink()
        self.plainly(words)

    def plan(self, words: list[str]) -> None:
        self.plainly([*words, "--time-limit", "5"])

    def ui(self, words: list[str]) -> None:
        """Until it prints its address; then Ctrl-C."""
        with self.start(words) as process:
            assert process.stdout
            lines = iter(process.stdout.readline, "")
            assert any("http://127.0.0.1" in line for line in lines), shlex.join(words)
            process.send_signal(signal.SIGINT)
            process.stdout.read()
        assert process.returncode in (0, 130)

    def order(self, words: list[str]) -> None:
        """To a run that is in progress."""
        if self.live is None:
            name = Path(words[-1]).name
            shutil.rmtree(self.folder / words[-1], ignore_errors=True)
            endless = ["run", "grpo", "--config", "grpo.yaml", f"name={name}", "total_iterations=100000"]
            self.live = self.start(["prefect-rlhf", *endless])
            metrics = self.folder / words[-1] / "metrics.jsonl"
            deadline = time.monotonic() + LIMIT_S
            while not (metrics.exists() and metrics.stat().st_size):
                assert self.live.poll() is None, self.live.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.1)
        self.plainly(words)
        if words[1] in ("stop", "cancel"):
            said, _ = self.live.communicate(timeout=LIMIT_S)
            summary = self.folder / words[-1] / "summary.json"
            assert summary.exists() == (words[1] == "stop"), said
            self.live = None

    def start(self, words: list[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


SPECIAL: dict[str, Callable[[Shell, list[str]], None]] = {
    "prefect-rlhf chat": Shell.chat,
    "prefect-rlhf init": Shell.init,
    "prefect-rlhf plan": Shell.plan,
    "prefect-rlhf ui": Shell.ui,
    **dict.fromkeys(
        (f"prefect-rlhf {order}" for order in ("pause", "resume", "stop", "cancel")), Shell.order
    ),
}


def marks_of(page: Printed) -> list[pytest.MarkDecorator]:
    if not page.is_slow:
        return []
    often = [] if page.page in LONG else [pytest.mark.whole]
    return [*often, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("page", [pytest.param(each, marks=marks_of(each), id=each.page) for each in PAGES])
def test_the_commands_of_a_page_run(
    page: Printed, printed_hub: Hub, named_files: Path, tmp_path: Path, request: pytest.FixtureRequest
):
    source = request.getfixturevalue("finished_runs") if page.is_slow else named_files
    folder = tmp_path / "here"
    shutil.copytree(source, folder, symlinks=True)
    for block in files_of(page.page):
        (folder / str(block.file)).write_text(shortened(block.text))
    shell = Shell(folder, printed_hub)
    for words in page.commands:
        shell.run([shortened(word) for word in words])
    assert shell.live is None


def files_of(page: str) -> list[Block]:
    """A page's configurations that have a title."""
    return [block for block in BLOCKS if block.page == page and block.language == "yaml" and block.file]


def test_what_is_carried_out_elsewhere_is_printed():
    """An entry that no page needs any more goes."""
    commands = [words for block in BLOCKS if block.language == "sh" for words in commands_in(block.text)]
    for beginning in ELSEWHERE:
        assert any(begins(words, beginning) for words in commands), beginning
