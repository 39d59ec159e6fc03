"""A second user trains by SFT, DPO, GRPO and PPO one after the other, on two ranks, without a reward model."""

import asyncio
from pathlib import Path

import pytest

from prefect_rlhf.flows.algorithms import flow_of
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from tests.committed import assert_same_run

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(900)]


def test_each_training_begins_from_the_one_before_and_gives_the_same_bits_twice(
    cluster, second_user, tmp_path
):
    place = {"cluster": {"address": cluster.scheduler_address, "devices_per_host": 2}}
    documents = {
        "sft": second_user.supervised("sft", "turns", assistant_only_loss=True),
        "dpo": second_user.supervised("dpo", "pairs"),
        "grpo": second_user.ppo("verl:compute_score", data="verl", type="grpo", num_generations=4),
        "ppo": second_user.ppo("openrlhf:as_list", data="chat"),
    }
    model = second_user.model
    for kind, document in documents.items():
        begun_from = (model / "config.json").read_bytes(), weights_of(model)
        changes = {"models": {"actor": str(model)}, "output_dir": str(tmp_path), **place}
        summaries = [
            asyncio.run(flow_of(kind)(make_config({**document, **changes, "name": f"{kind}-{time}"})))
            for time in ("first", "second")
        ]
        assert [summary["iterations"] for summary in summaries] == [2, 2]
        assert_same_run(tmp_path / f"{kind}-second", tmp_path / f"{kind}-first")
        assert begun_from == ((model / "config.json").read_bytes(), weights_of(model))
        made = [Path(summary["model"]) for summary in summaries]
        assert weights_of(made[0]) == weights_of(made[1]) != weights_of(model)
        assert (made[0] / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
        assert (made[0] / "chat_template.jinja").read_bytes() == (model / "chat_template.jinja").read_bytes()
        model = made[0]


def weights_of(model: Path) -> list[bytes]:
    """The contents of the weight files. A folder that we wrote has one."""
    return [file.read_bytes() for file in sorted(model.glob("*.safetensors"))]
