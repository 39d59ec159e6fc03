"""docs/tutorial.md, followed literally from an empty folder: its files are written, its commands run.

Only the model differs: a Hub on loopback serves a tiny one under the name of the tutorial's.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prefect_rlhf.flows.demo import write_model_folder
from tests.loopback_hub import Hub

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
LIMIT_S = 400


class Block(NamedTuple):
    """A block of code. file: where it belongs; None: commands"""

    language: str
    file: str | None
    text: str


def blocks() -> list[Block]:
    return [Block(language, file or None, text) for language, file, text in BLOCK.findall(PAGE.read_text())]


def test_every_block_is_a_file_or_a_command():
    assert all(block.file or block.language in ("sh", "text") for block in blocks())
    assert sum(block.language == "sh" for block in blocks()) >= 7


@pytest.fixture
def hub_with_a_tiny_model(hub: Hub, tmp_path: Path) -> Hub:
    folder = tmp_path / "tiny"
    write_model_folder(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    hub.add_folder(MODEL, folder)
    return hub


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.cluster
@pytest.mark.timeout(1500)
def test_the_tutorial_can_be_followed_from_an_empty_folder(hub_with_a_tiny_model: Hub, tmp_path: Path):
    folder = tmp_path / "lesson"
    folder.mkdir()
    environment = {
        **os.environ,
        **hub_with_a_tiny_model.environment(tmp_path / "hub"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    said = ""
    for block in blocks():
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.language == "sh":
            ended = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            assert ended.returncode == 0, f"{block.text}\n{ended.stdout}\n{ended.stderr}"
            said += ended.stdout
    assert "[1.0, 0.0]" in said, "the reward, tried by hand"
    assert json.loads((folder / "runs/sums/summary.json").read_text())["iterations"] == 20
    assert (folder / "runs/sums/model/adapter_model.safetensors").exists()
    assert (folder / "runs/weekly/models/champion").is_dir()
    decided = [
        json.loads(path.read_text()) for path in sorted((folder / "runs/weekly").glob("*/decision.json"))
    ]
    first, second = (each["rows"] for each in decided)
    assert first == 500
    assert 80 < second <= 100, "some of a hundred new questions were asked before"
