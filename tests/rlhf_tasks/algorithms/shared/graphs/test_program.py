"""Programs: the graphs that they give, and what no graph can be made of."""

import os
import random
import time
from dataclasses import replace
from itertools import product
from os import environ

import pytest

from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.rlhf_tasks.algorithms.registry import ConfigError, algorithm, in_parts
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import PROMPT_KEYS, ProgramError, concat, traced
from tests.rlhf_tasks.algorithms import listed

GROUP = 4
READ = ("input_ids", "response_mask", "old_logprobs", "scores")


def nominal(name="grpo", top_k=0, reward="", **changes):
    """A configuration with 16 samples and, for GRPO, groups of four. reward: None for no reward model."""
    config = algorithm(name).nominal()
    groups = {"num_generations": GROUP} if name == "grpo" else {}
    sampling = config.sampling.model_copy(update={"top_k": top_k})
    models = config.models.model_copy(update={"reward": reward, "judge": None})
    sizes = {"batch_size": 16, "num_mini_batches": 2, "sampling": sampling, "models": models}
    return config.model_copy(update={**sizes, **groups, **changes})


def calls_of(program, config=None):
    return traced(PROMPT_KEYS)(program)(config or nominal())


def sampled(models, prompts):
    samples = models.actor.generate(prompts)
    return samples | models.reward.score(samples)


@pytest.mark.parametrize(("beta", "masked", "top_k"), list(product((0.0, 0.1), (False, True), (0, 5))))
def test_grpo_is_the_same_graph_as_its_list_of_calls(beta, masked, top_k):
    for reward in ("", None):
        config = nominal(beta=beta, mask_truncated_completions=masked, top_k=top_k, reward=reward)
        assert algorithm("grpo").graph(config) == listed.grpo(config)


@pytest.mark.parametrize("top_k", [0, 5])
def test_ppo_is_the_same_graph_as_its_list_of_calls(top_k):
    config = nominal("ppo", top_k=top_k)
    assert algorithm("ppo").graph(config) == listed.ppo(config)


def test_a_call_reads_the_keys_of_its_handle_and_no_others():
    def program(models, prompts, config):
        samples = sampled(models, prompts.repeat(GROUP))
        assert samples.keys == ("input_ids", "response_mask", "old_logprobs", "truncated", "scores")
        models.actor.train(samples)

    *_, train = calls_of(program)
    assert train.inputs == ("input_ids", "response_mask", "old_logprobs", "truncated", "scores")

    def selecting(models, prompts, config):
        models.actor.train(sampled(models, prompts.repeat(GROUP)).select("scores", "input_ids"))

    *_, train = calls_of(selecting)
    assert train.inputs == ("scores", "input_ids")


def test_calls_on_the_parts_of_a_batch_are_one_call_in_parts():
    def program(models, prompts, config):
        parts = [sampled(models, part) for part in prompts.repeat(GROUP).chunk(2)]
        models.actor.train(concat(parts).select(*READ))

    def whole(models, prompts, config):
        models.actor.train(sampled(models, prompts.repeat(GROUP)).select(*READ))

    calls = calls_of(program)
    assert calls == in_parts(calls_of(whole), 2)
    assert [call.chunks for call in calls] == [2, 2, 1]
    assert DataflowGraph(calls, PROMPT_KEYS).chunks == 2


def test_parts_of_a_program_and_of_the_configuration_are_not_combined():
    def program(models, prompts, config):
        parts = [sampled(models, part) for part in prompts.repeat(GROUP).chunk(2)]
        models.actor.train(concat(parts).select(*READ))

    record = replace(algorithm("grpo"), graph=traced(PROMPT_KEYS)(program))
    assert [call.chunks for call in record.calls(nominal())] == [2, 2, 1]
    with pytest.raises(ConfigError, match=r"^chunks=4: the graph cuts 'actor_generate' into 2 parts itself"):
        record.calls(nominal(chunks=4))


def test_a_second_call_has_a_prefix_for_its_keys():
    calls = algorithm("remax").graph(nominal("remax"))
    score = next(call for call in calls if call.name == "greedy_reward_inference")
    assert score.remap["greedy_input_ids"] == "input_ids"
    assert score.remap["greedy_scores"] == "scores"


READS_A_VALUE = [
    bool,
    int,
    float,
    len,
    list,
    hash,
    lambda samples: [0][samples],
    lambda samples: samples == 1,
    lambda samples: samples != 1,
    lambda samples: samples > 0.5,
    lambda samples: samples <= 0.5,
    lambda samples: "scores" in samples,
    lambda samples: samples["scores"],
    lambda samples: samples.scores,
    lambda samples: samples + 1,
    lambda samples: 1 - samples,
    lambda samples: -samples,
    lambda samples: not samples,
]


def trains(models, prompts):
    models.actor.train(sampled(models, prompts.repeat(GROUP)))


def is_late():
    return time.time() > 1e9


def by_clock(models, prompts, config):
    if is_late():
        trains(models, prompts)


def by_environment(models, prompts, config):
    if "MORE" in environ or os.getenv("MORE"):
        trains(models, prompts)


def by_chance(models, prompts, config):
    trains(models, prompts.repeat(sum(random.random() > 0.5 for _ in range(2))))


def by_import(models, prompts, config):
    from datetime import datetime

    if datetime.now().hour > 12:
        trains(models, prompts)


@pytest.mark.parametrize(
    ("program", "name"),
    [(by_clock, "time"), (by_environment, "environ"), (by_chance, "random"), (by_import, "datetime")],
)
def test_a_graph_that_depends_on_clock_environment_or_chance_is_refused(program, name):
    """A resumed run makes it anew, and could have another one."""
    with pytest.raises(
        ProgramError, match=f"^the program .*:{program.__name__} reads '{name}', by which a resumed"
    ):
        calls_of(program)


@pytest.mark.parametrize("read", READS_A_VALUE)
def test_a_graph_that_depends_on_data_is_refused(read):
    def program(models, prompts, config):
        samples = sampled(models, prompts.repeat(GROUP))
        read(samples.select("scores"))
        models.actor.train(samples)

    with pytest.raises(ProgramError, match="the graph may not depend on data") as refused:
        calls_of(program)
    assert str(refused.value).startswith(f"the program {__name__}:program ")


def no_model(models, rows):
    models.critic.train(rows)


def nobody_makes_it(models, rows):
    models.actor.train(sampled(models, rows).select("input_ids", "values"))


def prompts_without_responses(models, rows):
    models.ref.logprobs(rows)


def trains_nothing(models, rows):
    sampled(models, rows)


def nobody_trains_on_it(models, rows):
    samples = sampled(models, rows)
    models.ref.logprobs(samples)
    models.actor.train(samples)


def twice(models, rows):
    models.actor.generate(rows)
    models.actor.generate(rows)


def twice_the_same_key(models, rows):
    models.actor.generate(rows)
    models.actor.generate(rows, name="again")


def repeats_responses(models, rows):
    models.actor.generate(rows).repeat(2)


def repeats_twice(models, rows):
    rows.repeat(GROUP)


def cuts_what_is_whole(models, rows):
    models.actor.generate(rows).chunk(2)


def cuts_a_part(models, rows):
    rows.chunk(2)[0].chunk(2)


def no_parts(models, rows):
    rows.chunk(0)


def half_a_batch(models, rows):
    first, second = rows.chunk(2)
    models.actor.generate(first)
    models.actor.train(second)


def half_a_call(models, rows):
    models.actor.generate(rows.chunk(2)[1])
    models.actor.train(rows)


def unlike_halves(models, rows):
    first, second = rows.chunk(2)
    models.actor.generate(first)
    models.actor.generate(second, ("input_ids",))


def halves_in_another_order(models, rows):
    first, second = (models.actor.generate(part) for part in rows.chunk(2))
    models.actor.train(concat([second, first]))


def a_half_and_the_whole(models, rows):
    rows.chunk(2)[0] | rows


def reads_no_keys(models, rows):
    models.actor.train(rows.select())


def joins_none(models, rows):
    concat([])


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (
            no_model,
            r"has the call 'critic_train' of 'critic', but .* no model for this role; its roles are actor, ref",
        ),
        (
            nobody_makes_it,
            r"selects 'values', which nobody has made here; there are input_ids, .*, scores\. Make",
        ),
        (prompts_without_responses, r"selects 'input_ids', which nobody has made here"),
        (trains_nothing, r"trains nothing, but its configuration is one of a training\. Call train"),
        (nobody_trains_on_it, r"has the call 'ref_inference', but nothing trains on ref_logprobs\. Give it"),
        (twice, r"has the call 'actor_generate' twice\. Give one of them another name"),
        (twice_the_same_key, r"makes 'input_ids' twice, by actor_generate and by again\. Let one"),
        (repeats_responses, r"repeats samples\(input_ids, .*\): only rows of the data set are repeated"),
        (repeats_twice, r"repeats samples\(prompt_ids, columns; in groups of 4\): only rows .* and once"),
        (
            cuts_what_is_whole,
            r"cuts samples\(input_ids, .*\) into 2 parts: only what is made in as many parts",
        ),
        (cuts_a_part, r"cuts samples\(.*part 1 of 2\) into 2 parts"),
        (no_parts, r"cuts samples\(.*\) into 0 parts"),
        (half_a_batch, r"trains 'actor_train' on a part, but a call that trains takes all samples\. Join"),
        (half_a_call, r"makes the call 'actor_generate' without part 1 of 2\. Make it for each part"),
        (unlike_halves, r"has a call 'actor_generate' whose parts differ\. Let all parts read"),
        (halves_in_another_order, r"concatenates 2 parts, but number 1 is samples\(.*; .*part 2 of 2\)"),
        (
            a_half_and_the_whole,
            r"joins samples\(.*part 1 of 2\) and samples\(.*\), which are not the same samples",
        ),
        (reads_no_keys, r"gives the call 'actor_train' no keys"),
        (joins_none, r"^concat joins no parts"),
    ],
)
def test_what_no_graph_can_be_made_of_is_refused_by_name(program, sentence):
    with pytest.raises(ProgramError, match=sentence):
        calls_of(lambda models, rows, config: program(models, rows.repeat(GROUP)), nominal(beta=0.1))


@pytest.mark.parametrize(
    ("repeated", "sentence"),
    [
        (lambda rows: rows, r"gives the call 'actor_generate' groups of 1, but .* group_size is 4\. Repeat"),
        (
            lambda rows: rows.repeat(3),
            r"repeats rows 3 times, but the configuration's group_size is 4\. Repeat",
        ),
    ],
)
def test_rows_are_repeated_as_often_as_the_configuration_says(repeated, sentence):
    with pytest.raises(ProgramError, match=sentence):
        calls_of(lambda models, rows, config: models.actor.generate(repeated(rows)))


def test_a_run_that_only_generates_need_not_train():
    assert [call.kind for call in algorithm("rollout").graph(algorithm("rollout").nominal())] == [
        "generate",
        "generate",
        "inference",
    ]
