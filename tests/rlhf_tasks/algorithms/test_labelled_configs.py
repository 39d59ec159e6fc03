"""Configurations of DPO, KTO and distillation: roles, and faults in one sentence."""

from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.kto import KTOConfig
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError


def document(kind: str, **changes: Any) -> dict[str, Any]:
    common = {"type": kind, "models": {"actor": "a"}, "data": {"train": "d"}, "total_iterations": 1}
    if kind == "distillation":
        common |= {"models": {"actor": "a", "teacher": "t"}, "sampling": {"max_completion_length": 8}}
    return {**common, **changes}


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_the_reference_is_the_actor_as_it_begins_or_another_folder(kind: str):
    roles = make_config(document(kind)).roles()
    assert (roles["actor"].folder, roles["ref"].folder, roles["ref"].optimizer) == ("a", "a", None)
    assert make_config(document(kind, models={"actor": "a", "ref": "r"})).roles()["ref"].folder == "r"


def test_a_teacher_does_not_train():
    roles = make_config(document("distillation")).roles()
    assert {name: role.optimizer is not None for name, role in roles.items()} == {
        "actor": True,
        "teacher": False,
    }


def test_a_mismatched_answer_is_anothers_in_the_same_mini_batch():
    config = make_config(document("kto", batch_size=6, num_mini_batches=2))
    assert isinstance(config, KTOConfig)
    assert [config.mismatched(sample) for sample in range(6, 12)] == [8, 6, 7, 11, 9, 10]


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("dpo", {"loss_type": "ipo", "label_smoothing": 0.1}, "has no meaning for loss_type=ipo."),
        ("dpo", {"loss_type": "hinge", "label_smoothing": 0.1}, "has no meaning for loss_type=hinge."),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing: input should be less than 0.5"),
        ("dpo", {"loss_type": "robust"}, "loss_type: input should be 'sigmoid', 'ipo' or 'hinge'"),
        ("dpo", {"beta": 0}, "beta: input should be greater than 0, found 0."),
        ("kto", {"desirable_weight": 0, "undesirable_weight": 0}, "nothing is learned"),
        ("kto", {"desirable_weight": -1}, "desirable_weight: input should be greater than or equal to 0"),
        ("kto", {"batch_size": 4, "num_mini_batches": 4}, "leave one sample to an optimizer step"),
        ("distillation", {"models": {"actor": "a"}}, "models.teacher: required, but not given."),
        ("distillation", {"sampling": {"max_completion_length": 8, "top_p": 0.9}}, "top_p=0.9"),
        ("distillation", {"sampling": {"max_completion_length": 8, "top_k": 5}}, "top_k=5"),
        ("distillation", {"sampling": {"max_completion_length": 8, "temperature": 0}}, "temperature=0"),
        ("distillation", {"sampling": {"max_completion_length": 8, "min_new_tokens": 2}}, "min_new_tokens=2"),
        (
            "distillation",
            {"rewards": [{"function": "m:f"}]},
            "rewards.0: a run of type 'distillation' uses rewards in",
        ),
        ("sft", {"packing": True}, "packing: unknown key"),
    ],
)
def test_faults_are_named(kind: str, changes: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as caught:
        make_config(document(kind, **changes))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
