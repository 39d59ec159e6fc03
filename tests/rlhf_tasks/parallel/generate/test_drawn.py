"""What engines beside the run answer becomes the samples that the built-in engine gives."""

from typing import Any

import pytest
import torch

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.drawn import requests_of, samples_of
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import generate
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order
from prefect_rlhf.rlhf_tasks.parallel.generate.places import MOST
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams
from tests.rlhf_tasks.parallel.generate.test_generation import STOPS, build, prompts


@pytest.mark.parametrize("early", [0, 3, 12])
def test_answers_become_the_samples_of_generate(early: int):
    """With `min_new_tokens` also which tokens the first ones could not be: all stop ids."""
    engine, batch = build("llama", torch.float64), prompts()
    params = SamplingParams(max_new_tokens=12, min_new_tokens=early, stop_ids=STOPS)
    wanted: Any = generate(engine, batch, params, 7, 2, record_kept=early > 0)
    order = Order(params, 7, 2, record_kept=early > 0)
    answers = []
    for ids, logprobs, drawn, cut in zip(
        *(wanted[key].split() for key in ("input_ids", "old_logprobs", "response_mask", "truncated")),
        strict=True,
    ):
        answers.append((ids[drawn].tolist(), logprobs[drawn].tolist(), "length" if cut else "stop"))
    found = samples_of(engine, batch, requests_of(batch, order), answers, order)
    assert found.data.keys() == wanted.data.keys()
    for key, packed in wanted.data.items():
        assert found[key].lengths == packed.lengths, key
        assert torch.equal(found[key].values, packed.values), key


def test_a_request_has_the_most_tokens_of_its_sample():
    batch, order = prompts(), Order(SamplingParams(max_new_tokens=12), 7, 2)
    assert {request.most for request in requests_of(batch, order)} == {12}
    mosts = list(range(1, len(batch) + 1))
    own = SampleBatch(batch.ids, {**batch.data, MOST: Packed(torch.tensor(mosts), (1,) * len(batch))})
    assert [request.most for request in requests_of(own, order)] == mosts
