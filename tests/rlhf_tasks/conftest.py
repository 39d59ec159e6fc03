"""A model without a chat template, and its tokenizer."""

from pathlib import Path

import pytest

from prefect_rlhf.flows.demo import write_model_folder
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_model_folder(folder)
    return folder


@pytest.fixture(scope="session")
def plain(plain_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(plain_folder)
