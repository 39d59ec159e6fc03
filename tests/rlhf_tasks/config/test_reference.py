"""A reference that follows the actor: which runs may ask for it, and when it changes."""

from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.reference import MovesReference

SAMPLES = {"sampling": {"max_completion_length": 8}, "rewards": [{"function": "m:f"}]}
REFERENCES: dict[str, dict[str, Any]] = {
    "ppo": SAMPLES,
    "grpo": {**SAMPLES, "beta": 0.1, "num_generations": 4},
    "rloo": {**SAMPLES, "num_generations": 4},
    "remax": {**SAMPLES, "beta": 0.1},
    "reinforce_pp": {**SAMPLES, "beta": 0.1},
    "dpo": {},
    "kto": {},
}
"""Every algorithm with a reference, and what else it needs to have one."""


def config_of(kind: str, **changes: Any) -> RunConfig:
    document = {"type": kind, "models": {"actor": "a"}, "data": {"train": "d"}, "total_iterations": 12}
    return make_config({**document, **REFERENCES.get(kind, {}), **changes})


@pytest.mark.parametrize("kind", REFERENCES)
def test_every_reference_may_follow_the_actor_and_by_default_none_does(kind: str):
    config = config_of(kind, sync_ref_model=True, ref_model_sync_steps=5)
    assert isinstance(config, MovesReference)
    assert config.follows == {"ref": "actor"}
    assert [t for t in range(12) if config.syncs_after(t)] == [4, 9]
    assert config_of(kind).follows == {}


def test_what_has_no_reference_has_no_such_field():
    with pytest.raises(ConfigError, match="sync_ref_model"):
        config_of("sft", sync_ref_model=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"beta": 0.0}, "sync_ref_model=true: the run has no reference, since beta=0"),
        ({"lora": {"rank": 4}}, "with lora the reference is the model without the adapters"),
        ({"ref_model_sync_steps": 13}, "ref_model_sync_steps=13 is more than total_iterations=12"),
        ({"ref_model_mixup_alpha": 0.0}, "ref_model_mixup_alpha"),
        ({"ref_model_mixup_alpha": 1.5}, "ref_model_mixup_alpha"),
    ],
)
def test_what_cannot_follow_is_refused_in_a_sentence(changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said) as refused:
        config_of("rloo", **{"sync_ref_model": True, "ref_model_sync_steps": 5, **changes})
    assert "\n" not in str(refused.value)
    if "sync" not in said:
        return
    config_of("rloo", **{**changes, "sync_ref_model": False})  # without it nothing is asked of these
