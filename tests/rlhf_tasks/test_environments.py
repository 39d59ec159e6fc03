"""Responses of several turns: the same losses under any plan; what was observed counts as context alone."""

import json
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch
from prefect_rlhf.rlhf_tasks.algorithms.grpo.functions import STD_EPSILON
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import LENGTHS
from prefect_rlhf.rlhf_tasks.system.counter_random import counter_bits
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from tests.rlhf_tasks.algorithms.one_rank import OneRank, runs_of_one
from tests.rlhf_tasks.test_layout_invariance import PLANS, differences, other_plans, trajectory
from tests.rlhf_tasks.test_parts import of_calls
from tests.tiny_runs import critic_free_config, ppo_config

pytestmark = pytest.mark.dist

ECHO = f"{Path(__file__).parents[1]}/tiny_environment.py:Echo"
MOODY = ECHO.replace("Echo", "Moody")
SAMPLING = {"max_completion_length": 30}
PLAYED = {"factory": ECHO, "max_turn_tokens": 8}


def grpo_config(folder, **changes):
    """GRPO, whose environment is its only reward."""
    of_groups = {} if changes.get("type") == "remax" else {"num_generations": 4}
    document = {
        "type": "grpo",
        "sampling": {**SAMPLING, "top_k": 200},
        "environment": PLAYED,
        "rewards": [],
        "dtype": "float64",
        **of_groups,
    }
    return critic_free_config(folder, **document | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model and prompts."""
    folder = tmp_path_factory.mktemp("played")
    grpo_config(folder)
    return folder


@pytest.fixture
def run(folder, tmp_path):
    """Begin a run of GRPO on this process."""
    with runs_of_one(grpo_config, folder, tmp_path) as begin:
        yield begin


KEYS = ("input_ids", "response_mask", "old_logprobs", "truncated", "environment_rewards")


def drawn(run, ids=range(16), iteration=0):
    """What a run draws for some samples of an iteration."""
    call = next(call for call in run.calls if call.kind == "generate")
    batch = fetch(run.rows, run.config, list(ids)).reorder(list(ids))
    output = run.output(call, run.engines["actor"], batch, iteration, range(ids[0], ids[-1] + 1))
    return output.batch


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def responses(run, batch):
    """Of each sample the text after its prompt, and as many marks: x where a token was drawn."""
    found = []
    for ids, mask in zip(batch["input_ids"].split(), batch["response_mask"].split(), strict=True):
        start = int(mask.int().argmax())
        found.append((ids[start:].tolist(), "".join("x" if each else "." for each in mask[start:].tolist())))
    return found


@other_plans(PLANS)
@pytest.mark.parametrize(
    ("staleness", "factory"),
    [
        (0, ECHO),
        pytest.param(1, ECHO, marks=pytest.mark.slow),
        pytest.param(1, MOODY, marks=pytest.mark.slow),
    ],
)
@pytest.mark.whole
def test_the_same_seed_gives_the_same_losses_under_any_plan(ranks, tmp_path, staleness, factory, names):
    config: Any = partial(
        ppo_config,
        environment={**PLAYED, "factory": factory},
        sampling=SAMPLING,
        staleness=staleness,
        on_reward_error="skip" if factory == MOODY else "stop",
    )
    more = {"actor_inference": "0"} if staleness else {}
    reference = trajectory(ranks, tmp_path, 1, {**PLANS["one rank"][1], **more}, config)
    assert len({seen["actor_train/loss/policy"] for seen in reference}) == 3
    if factory == MOODY:
        assert all(0 < seen["reward_inference/skipped_samples"] < 16 for seen in reference)
    assert all(seen["actor_train/policy/mismatch"] < 1e-12 for seen in reference)
    for name in names:
        found = trajectory(ranks, tmp_path, PLANS[name][0], {**PLANS[name][1], **more}, config)
        assert not differences(reference, found), name


@pytest.mark.slow
def test_so_do_parts_of_a_batch(ranks, tmp_path):
    config: Any = partial(ppo_config, environment=PLAYED, sampling=SAMPLING)
    reference = trajectory(ranks, tmp_path, 1, PLANS["one rank"][1], config)
    in_parts: Any = partial(ppo_config, environment=PLAYED, sampling=SAMPLING, chunks=4)
    found = trajectory(ranks, tmp_path, 1, PLANS["one rank"][1], in_parts)
    assert not differences(reference, of_calls(found))


def test_a_sequence_does_not_depend_on_those_beside_it_nor_on_who_answers_first(run):
    whole = drawn(run())
    later = drawn(run(environment={**PLAYED, "kwargs": {"wait_s": 0.1}}, reward_processes=3))
    for key in KEYS:
        assert torch.equal(whole[key].values, later[key].values), key
    apart = drawn(run(environment={**PLAYED, "kwargs": {"wait_s": 0.02}, "together": False}))
    for key in KEYS:
        torch.testing.assert_close(whole[key].values, apart[key].values, rtol=0, atol=1e-12)
    some = drawn(run(), range(5, 12))
    assert responses(run(), some) == responses(run(), whole)[5:12]
    assert some["environment_rewards"].values.tolist() == whole["environment_rewards"].values.tolist()[5:12]


def test_turns_and_observations_take_turns_and_only_what_is_drawn_is_marked(run):
    begun = run()
    batch = drawn(begun)
    found = responses(begun, batch)
    assert {"x" * 8, "x" * 8 + "..." + "x" * 8} <= {marks for _, marks in found}
    assert all(marks.endswith("x") for _, marks in found)
    observed = [
        begun.tokenizer.decode([token for token, mark in zip(ids, marks, strict=True) if mark == "."])
        for ids, marks in found
    ]
    assert set("".join(observed)) <= set("<0123456789>")
    assert "<8>" in "".join(observed)
    assert not batch["truncated"].values.any()
    assert torch.all(batch["old_logprobs"].values[~batch["response_mask"].values] == 0)


def test_the_reward_is_the_sum_over_all_turns(run):
    begun = run()
    batch, rows = drawn(begun), fetch(begun.rows, begun.config, list(range(16)))["columns"].texts()
    wanted, numbers = [], []
    for (ids, marks), row in zip(responses(begun, batch), rows, strict=True):
        turns = [
            begun.tokenizer.decode([token for token, _ in turn])
            for mark, turn in groupby(zip(ids, marks, strict=True), key=itemgetter(1))
            if mark == "x"
        ]
        wanted.append(sum(len(text) / 16 - (json.loads(row)["answer"] in text) for text in turns))
        numbers.append(len(turns))
    assert max(numbers) > 1
    assert batch["environment_rewards"].values.tolist() == pytest.approx(wanted)


def test_an_environments_seed_is_a_function_of_the_runs_the_iteration_and_the_sample(run, tmp_path):
    log = tmp_path / "seeds"
    begun, ids = run(environment={**PLAYED, "kwargs": {"counted": str(log)}}), range(5, 12)
    drawn(begun, ids, iteration=2)
    wanted = counter_bits(0, "environment/rollout", 2, np.array(ids), np.zeros(1, dtype=np.int64)).tolist()
    assert sorted(lines(log)) == sorted(wanted)


def test_the_budget_and_the_number_of_turns_truncate(run):
    short = drawn(run(sampling={"max_completion_length": 10}))
    most = max(mask.sum().item() for mask in short["response_mask"].split())
    assert most == 8, "after the observation of three tokens none is left"
    assert short["truncated"].values.any()
    once = drawn(run(environment={**PLAYED, "max_turns": 1}))
    assert torch.equal(once["truncated"].values, short["truncated"].values)
    whole = drawn(run(sampling={"max_completion_length": 13}))
    assert max(mask.sum().item() for mask in whole["response_mask"].split()) == 10
    uneven = run(sampling={"max_completion_length": 14, "stop": list(range(32, 64))})
    lengths = [len(marks) for _, marks in responses(uneven, drawn(uneven))]
    assert max(lengths) == 14, "though others of the same turn have more room"


def test_scores_are_the_sum_of_environment_and_rewards(run, tmp_path):
    reward = f"{Path(__file__).parents[1]}/tiny_reward.py:length_reward"
    metrics, store = run(rewards=[{"function": reward, "weight": 2.0}]).iterate(0)
    assert metrics["turns/read_again"] == 0
    assert metrics["throughput/longest_think_s"] > metrics["throughput/think_s"] > 0
    masks = store.get(range(16), ["response_mask"])["response_mask"].split()
    turns = [[drawn for drawn, _ in groupby(mask[mask.int().argmax() :].tolist())] for mask in masks]
    assert metrics["turns/count"] == sum(map(sum, turns)) / 16
    assert metrics["turns/observed"] == sum(int((~mask[mask.int().argmax() :]).sum()) for mask in masks) / 16
    samples = store.get(range(16), ["scores", "environment_rewards"])
    assert metrics["rewards/Echo/mean"] == pytest.approx(samples["environment_rewards"].values.mean().item())
    judged = (samples["scores"].values - samples["environment_rewards"].values).mean().item()
    assert 2 * metrics["rewards/length_reward/mean"] == pytest.approx(judged)
    [path] = (tmp_path / "samples").glob("*.jsonl")
    written = [line["rewards"]["Echo"] for line in lines(path)]
    assert written == samples["environment_rewards"].values.tolist()[: len(written)]


def test_the_gradient_is_that_of_the_drawn_tokens_alone(run, folder):
    refuse_other_gradient(run(sampling=SAMPLING, beta=0.0), folder)


def refuse_other_gradient(begun, folder):
    """The first gradient is as plain transformers computes it, from GRPO's formula: what was observed is context, and
    nothing else. Where a sample is several sequences, its loss is the mean over what was drawn in all."""
    metrics, store = begun.iterate(0)
    batch = store.get(range(16), ["input_ids", "response_mask", "scores"])
    of_samples = batch["input_ids"].lengths
    if begun.config.agent is not None:
        of_samples = [part.tolist() for part in store.get(range(16), [LENGTHS])[LENGTHS].split()]
    scores = batch["scores"].values.view(-1, 4)
    advantages = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + STD_EPSILON)

    def norm(counts):
        model = AutoModelForCausalLM.from_pretrained(folder / "actor", dtype=torch.float64)
        loss = torch.zeros((), dtype=torch.float64)
        samples = zip(
            batch["input_ids"].split(),
            batch["response_mask"].split(),
            of_samples,
            advantages.flatten(),
            strict=True,
        )
        for tokens, masks, lengths, advantage in samples:
            drawn = []
            for ids, mask in zip(tokens.split(lengths), masks.split(lengths), strict=True):
                logits = model(ids[None]).logits[
                    0, :-1, : begun.rows.vocabulary
                ]  # the model's has more tokens
                logprobs = logits.log_softmax(-1)
                drawn.append(logprobs.gather(1, ids[1:, None])[counts(mask)[1:], 0])
            loss = loss - advantage * torch.cat(drawn).mean() / 16
        loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        return torch.cat([each.flatten() for each in gradients]).norm().item()

    assert metrics["grad_norm/actor"] == pytest.approx(norm(lambda mask: mask), rel=1e-7)
    from_the_first = norm(lambda mask: torch.arange(len(mask)) >= mask.int().argmax())
    assert metrics["grad_norm/actor"] != pytest.approx(from_the_first, rel=1e-3)


def test_an_environment_that_fails_is_told_with_the_sample_its_row_and_its_turn(run, tmp_path):
    (tmp_path / "rooms.py").write_text(
        "class Bad:\n    def reset(self, row, seed):\n        pass\n\n"
        "    def step(self, text):\n        return 'long ' * 9, 0.0, False\n"
    )
    bad = {"factory": f"{tmp_path}/rooms.py:Bad", "max_turn_tokens": 2}
    with pytest.raises(RewardError) as caught:
        drawn(run(environment=bad, sampling={"max_completion_length": 44}))
    assert str(caught.value).startswith(
        f"environment {tmp_path}/rooms.py:Bad: an observation has 45 tokens, but a response at most "
        "sampling.max_completion_length=44. Shorten the one or raise the other. It was at sample 0 (0), "
        'whose turn 1 was "'
    )
    longer = run(environment=bad, sampling={"max_completion_length": 45})
    assert drawn(longer)["truncated"].values.all()


def test_a_sample_on_which_the_environment_fails_leaves_the_batch_as_after_a_rewards_fault(run, tmp_path):
    plain = drawn(run())
    begun = run(environment={**PLAYED, "factory": MOODY}, on_reward_error="skip")
    metrics, store = begun.iterate(0)
    keys = ("stays", "scores", "environment_rewards", "truncated", "input_ids", "response_mask")
    batch = store.get(range(16), keys)
    stays = batch["stays"].values
    assert metrics["skipped_samples"] == 16 - stays.sum() > 1
    rewards = batch["environment_rewards"].values[stays]
    assert metrics["rewards/Moody/mean"] == metrics["reward"] == pytest.approx(rewards.mean().item())
    of_plain, of_moody = responses(begun, plain), responses(begun, batch)
    assert of_moody == of_plain, "an episode that fails at its end has all its turns"
    assert torch.equal(batch["truncated"].values, ~stays)
    listed = lines(tmp_path / "skipped-samples/00000000-0000.jsonl")
    assert [line["sample"] for line in listed] == (~stays).nonzero().flatten().tolist()
    assert {(line["iteration"], line["reward"]) for line in listed} == {(0, "Moody")}
    assert {line["reason"].partition("tiny_environment.py")[0] for line in listed} == {
        f"environment {MOODY.removesuffix('tiny_environment.py:Moody')}"
    }
    reasons = " ".join(line["reason"] for line in listed)
    assert "step raised ValueError: in a mood at " in reasons
    assert (
        "an observation has 297 tokens, but a response at most sampling.max_completion_length=30." in reasons
    )
    [samples] = (tmp_path / "samples").glob("*.jsonl")
    shown = lines(samples)
    assert [line["score"] is None for line in shown] == (~stays).tolist()[: len(shown)]
    assert [line["rewards"]["Moody"] is None for line in shown] == (~stays).tolist()[: len(shown)]


def test_a_sample_on_which_a_reward_fails_counts_in_no_mean_of_the_environment_either(run, tmp_path):
    (tmp_path / "picky.py").write_text(
        "def picky(data_source=None, solution_str='', ground_truth=None, **columns):\n"
        "    assert len(solution_str) % 2, 'even'\n    return 0.0\n"
    )
    rewards = [{"function": f"{tmp_path}/picky.py:picky"}]
    metrics, store = run(rewards=rewards, on_reward_error="skip").iterate(0)
    batch = store.get(range(16), ["stays", "environment_rewards"])
    stays, played = batch["stays"].values, batch["environment_rewards"].values
    assert 0 < stays.sum() < 16
    assert metrics["rewards/Echo/mean"] == metrics["reward"] == pytest.approx(played[stays].mean().item())


def test_in_an_evaluation_a_failed_answer_counts_as_zero(run, folder, tmp_path):
    kept = ("data", "output_dir", "sampling", "environment", "on_reward_error", "dtype", "batch_size")
    trained = run(environment={**PLAYED, "factory": MOODY}, on_reward_error="skip").config
    own = {key: value for key, value in trained.model_dump(mode="json").items() if key in kept}
    begun = OneRank(
        make_config({**own, "type": "evaluate", "models": {"actor": str(folder / "actor")}}), tmp_path
    )
    metrics, store = begun.iterate(0)
    begun.close()
    batch = store.get(range(16), ["stays", "scores", "environment_fault", "environment_rewards"])
    failed = torch.tensor([bool(fault) for fault in batch["environment_fault"].texts()])
    assert metrics["skipped_samples"] == failed.sum() > 1
    assert batch["stays"].values.all()
    played = batch["environment_rewards"].values
    assert torch.equal(batch["scores"].values, torch.where(failed, 0.0, played))
    assert metrics["reward"] == pytest.approx(played[~failed].sum().item() / 16)
    assert metrics["rewards/Moody/mean"] == pytest.approx(played[~failed].mean().item())


def test_an_environment_that_fails_on_every_sample_ends_the_run(run, tmp_path):
    (tmp_path / "rooms.py").write_text(
        "class Bad:\n    def reset(self, row, seed):\n        raise LookupError('closed')\n\n"
        "    def step(self, text):\n        pass\n"
    )
    bad = {"factory": f"{tmp_path}/rooms.py:Bad"}
    with pytest.raises(RewardError) as caught:
        run(environment=bad, on_reward_error="skip").iterate(0)
    assert str(caught.value) == (
        "a reward or the environment failed on every sample of iteration 0, so none is left. Of sample 0: "
        f"environment {tmp_path}/rooms.py:Bad: reset raised LookupError: closed at {tmp_path}/rooms.py:3. "
        "skipped-samples in the run folder has the others."
    )


def test_what_no_environment_can_answer_is_refused(folder):
    config = grpo_config(folder, type="remax")
    with pytest.raises(
        ConfigError, match="also draws responses in 'greedy_generate', which no environment answers"
    ):
        algorithm("remax").calls(config)
    with pytest.raises(ConfigError, match="min_new_tokens=9 exceeds environment"):
        grpo_config(folder, sampling={**SAMPLING, "min_new_tokens": 9})
