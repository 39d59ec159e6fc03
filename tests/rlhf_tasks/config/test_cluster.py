"""A placement by hand is a line of text: what is printed is read back, what is none is refused in a sentence."""

import random
from typing import Any

import pytest

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.config.cluster import ByHand
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import MAX_DEVICES
from tests.rlhf_tasks.algorithms.test_configurations import ppo

READ = {
    "0": ByHand((0,)),
    "hosts 0,2 t8": ByHand((0, 2), of_hosts=True, tp=8),
    "3,0-2 d2 t2": ByHand((3, 0, 1, 2), dp=2, tp=2),
    "0-7 d2 t2 p2 m4 tokens offload order0": ByHand(
        tuple(range(8)), False, 2, 2, 2, 1, 4, "tokens", offload=True, order=0
    ),
    "0-7 t2 p2 c2": ByHand(tuple(range(8)), tp=2, pp=2, cp=2),
    "0-3 d4 sharded": ByHand((0, 1, 2, 3), dp=4, sharded=True),
}


@pytest.mark.parametrize("text", READ)
def test_a_placement_is_read_and_printed(text: str):
    assert ByHand.parse(text) == READ[text]
    assert str(READ[text]) == text


def test_words_have_any_order_and_defaults_are_not_printed():
    assert str(ByHand.parse("  0,1,2,3  offload p1 m1 t2  d2 ")) == "0-3 d2 t2 offload"
    assert str(ByHand.parse(3)) == "3", "YAML reads a single device as a number"


def test_whatever_is_printed_is_read_back():
    rng = random.Random(0)
    for _ in range(500):
        numbers = tuple(rng.sample(range(40), rng.randint(1, 9)))
        numbers = tuple(sorted(numbers)) if rng.random() < 0.5 else numbers
        dp, tp, pp, cp, micro_batches = (rng.randint(1, 9) for _ in range(5))
        balance, order = rng.choice(("count", "tokens")), rng.choice((None, 0, 7))
        of_hosts, sharded, offload = (rng.random() < 0.5 for _ in range(3))
        placement = ByHand(numbers, of_hosts, dp, tp, pp, cp, micro_batches, balance, sharded, offload, order)
        assert ByHand.parse(str(placement)) == placement


def test_an_assignment_is_printed_as_it_is_written():
    assert str(ByHand.of(ByHand.parse("hosts 1-2 d2 t4 tokens").assignment(4))) == "4-11 d2 t4 tokens"
    assert str(ByHand.of(ByHand.parse("0-3 sharded d2 t2").assignment(4))) == "0-3 d2 t2 sharded"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0-1 t2 sharded", "sharded weights are cut over dp, and dp is 1. Choose a larger dp"),
        ("0-3 d2 p2 sharded", "sharded weights with pp=2: each stage would gather its layers anew"),
    ],
)
def test_weights_that_cannot_be_sharded_are_refused(text: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        ByHand.parse(text).assignment(4)


NO_PLACEMENT = [
    "",
    "d2",
    "hosts",
    "hosts d2",
    "hosts 0-",
    "-1",
    "0-1-2",
    "0,",
    "0,,1",
    "0-1 x2",
    "0-1 d",
    "0-1 d-2",
    "0-1 dp2",
    "0 d٢",
    "0 1",
    "0-" + "9" * 5000,
    "0 " * 10**5,
    None,
    True,
    1.5,
    [0, 1],
    {"devices": [0, 1], "dp": 2},
]


@pytest.mark.parametrize("written", NO_PLACEMENT, ids=lambda value: str(value)[:30])
def test_what_is_no_placement_is_refused_with_one_that_is(written: Any):
    with pytest.raises(ConfigError) as caught:
        make_config(ppo(plan={"actor_train": written}))
    sentence = str(caught.value)
    assert sentence.startswith("plan.actor_train: ")
    assert "Write, for example, 0-3 d2 t2 p1 m4 tokens sharded offload order0, or hosts 0,2 t8" in sentence
    assert "\n" not in sentence
    assert len(sentence) < 600


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("0 d0", "d in '0 d0' is a number from 1 to 131072, found 0."),
        ("0 order1001", "order in '0 order1001' is a number from 0 to 1000, found 1001."),
        ("0-1 d2 d2", "'0-1 d2 d2' gives dp twice. Leave out one."),
        ("3-0 d4", "3-0 in '3-0 d4' counts down. Write 0-3, or name each number."),
        ("0-999999999", "0-999999999 in '0-999999999' exceeds 131072 devices. Name fewer."),
        (",".join(["0-131071"] * 100), "exceeds 131072 devices. Name fewer."),
    ],
)
def test_a_number_that_cannot_be_is_named(written: str, sentence: str):
    with pytest.raises(ConfigError) as caught:
        make_config(ppo(plan={"actor_train": written}))
    assert str(caught.value).endswith(sentence)


def test_the_largest_cluster_can_be_named():
    assert len(ByHand.parse(f"0-{MAX_DEVICES - 1}").numbers) == MAX_DEVICES
