"""TRL's `rollout_func` as a rollout: what the endpoint has recorded is learned, and the result must agree with it."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prefect_rlhf.rlhf_tasks.user_code.agents import rollouts
from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError
from tests.registry import folder_of
from tests.rlhf_tasks.algorithms.one_rank import runs_of_one
from tests.rlhf_tasks.test_agents import counts
from tests.rlhf_tasks.test_environments import (
    SAMPLING,
    drawn,
    folder,
    grpo_config,
    lines,
    refuse_other_gradient,
    responses,
)

__all__ = ["folder"]  # a fixture

pytestmark = pytest.mark.dist

FILE = Path(__file__).parents[3] / "tiny_rollout.py"


def rollout(name):
    return {"environment": None, "agent": {"command": f"trl:{FILE}:{name}"}}


@pytest.fixture
def run(folder, tmp_path):
    """Begin a run of GRPO on this process, by the name of a rollout_func."""

    def config(folder, name, **changes):
        return grpo_config(folder, **{**rollout(name), **changes})

    with runs_of_one(config, folder, tmp_path) as begin:
        yield begin


def test_what_the_environment_says_is_context_and_a_request_in_tokens_continues_in_the_same_tokens(run):
    begun = run("plays")
    batch = drawn(begun)
    assert {branches for _, _, branches, _ in counts(batch)} == {1}
    for (ids, marks), (requests, *_) in zip(responses(begun, batch), counts(batch), strict=True):
        turns = marks.split("...")
        assert len(turns) == requests
        assert ids[len(turns[0]) :][:3] == [5, 6, 7]
    assert torch.all(batch["old_logprobs"].values[~batch["response_mask"].values] == 0)
    assert {requests for requests, *_ in counts(batch)} == {2, 3}, "random numbers are the sample's"
    again = drawn(run("plays"), range(5, 12))
    assert responses(run("plays"), again) == responses(begun, batch)[5:12]


def test_the_gradient_is_that_of_the_drawn_tokens_alone(run, folder):
    refuse_other_gradient(run("plays", sampling=SAMPLING, beta=0.0), folder)


def test_an_episode_without_room_is_cut(run):
    batch = drawn(run("endless", sampling={"max_completion_length": 16}), range(4))
    for (requests, refused, branches, left_out), ids in zip(
        counts(batch), batch["input_ids"].split(), strict=True
    ):
        assert (branches, left_out) == (1, 0)
        assert refused > 0
        assert requests == 4
        assert ids[:2].tolist() == [5, 6]
    assert batch["truncated"].values.any()


def test_env_reward_is_the_reward_where_the_run_has_no_other(run):
    metrics, store = run("plays").iterate(0)
    samples = store.get(range(16), ["scores", "input_ids", "response_mask"])
    lengths = [len(ids) for ids, _ in responses(None, samples)]
    assert samples["scores"].values.tolist() == [length / 16 for length in lengths]
    assert metrics["rewards/agent/mean"] == pytest.approx(sum(lengths) / 16 / 16)


def test_rewards_get_its_fields_by_name_and_env_reward_does_not_count_twice(run):
    begun = run("plays", rewards=[{"function": f"{FILE}:env_reward"}])
    metrics, store = begun.iterate(0)
    samples = store.get(range(16), ["scores", "input_ids", "response_mask", "agent_counts"])
    found = zip(responses(begun, samples), counts(samples), strict=True)
    assert samples["scores"].values.tolist() == [
        len(ids) / 16 + 10 * (requests - 1) for (ids, _), (requests, *_) in found
    ]
    assert "rewards/agent/mean" not in metrics


FAULTS = {
    "lacks": "rollout_func must return keys ['logprobs'] in its output dict.",
    "several": "rollout_func returned 8 completion_ids for one prompt: it gets a list of one, and "
    "trainer.num_generations is 1.",
    "short": "rollout_func returned 1 env_mask for ",
    "unmasked": "is 1, and the policy drew ",
    "forgets": "Return all that it drew, in this order, and give what it did not draw a 0 in env_mask.",
    "flat": "rollout_func must return a list of lists as completion_ids, found [int].",
    "listed": "rollout_func must return a dict, found list.",
    "odd": "rewards cannot get the fields that rollout_func returned: a object is no number, text, list or dict.",
    "unrewarded": "it gave no reward: it returned no env_reward, and the run has no rewards.",
    "words": "it gave no reward: the reward 'much' is no finite number.",
    "raises": "it exited with status 1: KeyError: 'no such door'.",
    "kills": "it was ended by signal 9.",
    "sleeps": "it did not end in 8 s, which agent.timeout_s sets.",
    "reaches": "AttributeError: trainer.model is not here: the model and its optimizer are on the ranks of the run. "
    "Draw by trainer.vllm_generation.generate; trainer has accelerator, args, ",
    "greedy": "temperature=0.0: this run draws with temperature=1, so that it can learn from it.",
    "narrow": "top_k=3 is not supported here.",
    "stranger": "prompt: the tokenizer has no token 1000000, only ",
    "absent": f"{FILE} has no function 'absent'.",
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_trl_would_not_take_or_a_run_cannot_give_is_one_sentence(run, name):
    with pytest.raises(RewardError) as raised:
        drawn(
            run(name, agent={**rollout(name)["agent"], "timeout_s": 8 if name == "sleeps" else 600}), range(1)
        )
    said = str(raised.value)
    assert said.startswith(f"agent trl:{FILE}:{name}: it ")
    assert FAULTS[name] in said


def test_or_costs_a_sample(run, tmp_path):
    metrics, store = run("moody", on_reward_error="skip").iterate(0)
    stays = store.get(range(16), ["stays"])["stays"].values
    assert metrics["skipped_samples"] == 16 - stays.sum() > 4
    assert stays.sum() > 4
    listed = lines(tmp_path / "skipped-samples/00000000-0000.jsonl")
    assert {line["reason"].rpartition("1: ")[2] for line in listed} == {"KeyError: 'no such door'."}


REAL = FILE.with_name("trl_rollout.py")
STOPS = {"max_completion_length": 110, "stop": list(range(40, 70))}  # a turn has eight tokens in the mean


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("version", "name"), [("1.8.0", "with_helper"), ("1.16.0", "with_vllm")])
def test_a_function_with_the_real_package_plays_and_its_reward_is_learned(run, monkeypatch, version, name):
    package = folder_of(wanted := f"trl=={version}", (wanted,))
    monkeypatch.setattr(sys, "path", [*sys.path, str(package)])  # of the processes of agents
    begun = run("", **{
        "agent": {"command": f"trl:{REAL}:{name}"},
        "rewards": [{"function": f"{REAL}:reward_from_env"}],
        "sampling": STOPS,
        "beta": 0.0,
    })  # fmt: skip
    metrics, store = begun.iterate(0)
    keys = ["scores", "input_ids", "response_mask", "agent_counts", "sequence_lengths"]
    samples = store.get(range(16), keys)
    assert counts(samples) == [(3, 0, 1, 0)] * 16
    assert all(0 < score <= 3 for score in samples["scores"].values.tolist())
    assert metrics["rewards/reward_from_env/mean"] == pytest.approx(samples["scores"].values.mean().item())
    assert metrics["grad_norm/actor"] > 0
    for _, marks in responses(begun, samples):
        assert [bool(said) for said in re.findall("x+|[.]+", marks)] == [True] * 5, "three turns, two answers"


@pytest.mark.slow
def test_trl_calls_it_and_is_asked_by_these_names():
    """As of the newest version that this is written for, in the source of its trainer."""
    script = (
        "import inspect, json\n"
        "from trl.trainer.grpo_trainer import GRPOTrainer\n"
        "from trl.generation.vllm_generation import VLLMGeneration\n"
        "from trl.generation.vllm_client import VLLMClient\n"
        "asked = VLLMGeneration.generate, VLLMClient.generate, VLLMClient.chat\n"
        "names = [list(inspect.signature(each).parameters) for each in asked]\n"
        "print(json.dumps([names, inspect.getsource(GRPOTrainer)]))\n"
    )
    package = folder_of("trl==1.16.0", ("trl==1.16.0",))
    environment = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    (whole, generate, chat), source = json.loads(ran.stdout.splitlines()[-1])
    assert whole == list(inspect.signature(rollouts.Generation.generate).parameters)
    for theirs, ours in ((generate, rollouts.Client.generate), (chat, rollouts.Client.chat)):
        assert {each for each in inspect.signature(ours).parameters if each != "stated"} <= {*theirs}
    for line in (
        "output = self.rollout_func(prompts, self)",
        'required_keys = {"prompt_ids", "completion_ids", "logprobs"}',
        'f"rollout_func must return keys {missing_keys_list} in its output dict."',
        'tool_mask = extra_fields.pop("env_mask", None)',
        "inp[key] = values[i]",
    ):
        assert line in source
