"""The environment of an engine: made beside, named at the end, and never made over another."""

import subprocess
from pathlib import Path

import pytest

from prefect_rlhf.flows.commands import setup as module
from prefect_rlhf.flows.commands.setup import setup
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError


def test_the_commands_of_an_environment_run_under_its_last_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """pip writes the interpreter's path into each command, and the folder is renamed when all is installed."""
    monkeypatch.setenv("PREFECT_RLHF_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_install", lambda python, folder: None)  # 3 GB
    setup("vllm")
    pip = tmp_path / "vllm" / "bin" / "pip"
    said = subprocess.run([pip, "--version"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path / "vllm" / "lib") in said
    assert [path.name for path in tmp_path.iterdir()] == ["vllm"]
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"vllm is there already. Remove it to make it anew."):
            setup("vllm")


def test_an_engine_without_an_environment_is_named():
    with pytest.raises(ConfigError, match=r"There is no environment to make for 'sglang'\. Name vllm"):
        setup("sglang")
