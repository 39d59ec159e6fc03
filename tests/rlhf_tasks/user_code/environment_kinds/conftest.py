"""The packages whose environments are played, each in a folder of its own, made once on a machine."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.config.packages import PACKAGES
from prefect_rlhf.rlhf_tasks.user_code.environments import EnvironmentProcess
from prefect_rlhf.rlhf_tasks.user_code.episodes import Answer, Episode, FailedAnswer
from tests.registry import folder_of

NEEDS: Mapping[str, tuple[str, ...]] = {
    "openenv": ("fastmcp>=3", "openai>=2.7.2", "tomli-w>=1.2", "websockets>=15.0.1"),
    "verifiers": (
        *("aiohttp>=3.14.1", "anthropic>=1.0.0", "gepa>=0.0.6", "httpx2>=2.12.0", "loguru>=0.7.0"),
        *("math-verify>=0.8.0", "msgpack>=1.1.2", "openai>=2.54.0", "prime-pydantic-config[toml]>=0.4.3"),
        *("prime-runs>=0.1.4", "prime-sandboxes>=0.4.2", "prime-tunnel>=0.1.14", "pyzmq>=27.1.0"),
        *("renderers[multimodal]>=0.1.12", "tenacity>=8.5.0", "tomli-w>=1.0.0", "uvicorn>=0.52.0"),
    ),
}
"""Kind -> what is installed of its package's requirements, where that is not all: OpenEnv's `gradio`, which only its
web pages need, takes no huggingface-hub of version 2; verifiers asks for mcp 2.0.0 alone, and runs with ours."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make a kind's package one that the processes of environments find."""

    def make(kind: str) -> Path:
        package = PACKAGES[kind]
        wanted = f"{package.name}=={package.version}"
        folder = folder_of(wanted, NEEDS.get(kind, (wanted,)))
        monkeypatch.setenv("PYTHONPATH", str(folder))  # of a server
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])  # of the processes of environments
        return folder

    return make


class Table:
    """Plays an environment in its own process."""

    def __init__(self, factory: str, **kwargs: Any) -> None:
        config = make_config(
            {
                "type": "rollout",
                "models": {"actor": "a"},
                "data": {"train": "d"},
                "sampling": {"max_completion_length": 4},
                "reward_timeout_s": 100,
                "environment": {"factory": factory, "kwargs": kwargs},
            }
        )
        self.process = EnvironmentProcess(config)

    def play(self, row: Mapping[str, Any], *turns: str, seed: int = 7, sample: int = 0) -> Any:
        """What each turn of an episode is answered with."""
        answers: list[Answer | FailedAnswer] = []
        for number in range(1, len(turns) + 1):
            answers += self.process.answers([Episode(sample, row, seed, turns[:number])])
        return [tuple(answer) for answer in answers]


@pytest.fixture
def table() -> Iterator[Callable[..., Table]]:
    """Begin to play an environment."""
    begun: list[Table] = []

    def make(factory: str, **kwargs: Any) -> Table:
        begun.append(Table(factory, **kwargs))
        return begun[-1]

    yield make
    for each in begun:
        each.process.close()


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """What `prefect-rlhf rows` writes for an environment."""

    def make(factory: str, count: int, first: int = 0, **kwargs: Any) -> list[dict[str, Any]]:
        document = {
            "type": "rollout",
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "sampling": {"max_completion_length": 4},
            "environment": {"factory": factory, "kwargs": kwargs},
        }
        (tmp_path / "run.yaml").write_text(json.dumps(document))
        places = [str(tmp_path / name) for name in ("run.yaml", "rows.jsonl")]
        assert run_command(["rows", *places, "--count", str(count), "--first", str(first)]) == 0
        return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]

    return make
