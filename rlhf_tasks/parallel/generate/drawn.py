"""What engines beside the run are asked, and the samples that their answers make."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order
from prefect_rlhf.rlhf_tasks.parallel.generate.places import MOST
from prefect_rlhf.rlhf_tasks.parallel.layout.work import generation_flops
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.counter_random import counter_bits


class Request(NamedTuple):
    """A prompt, the seed of its response, and the most tokens of that."""

    prompt: list[int]
    seed: int
    most: int


def requests_of(batch: SampleBatch, order: Order) -> list[Request]:
    """What is asked for each prompt. A seed follows from the order and the sample's id alone."""
    prompts = [prompt.tolist() for prompt in batch["prompt_ids"].to(torch.device("cpu")).split()]
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    ids = torch.tensor(batch.ids, dtype=torch.int64)
    seeds = counter_bits(order.seed, order.purpose, order.iteration, ids, lengths).tolist()
    mosts = [order.params.max_new_tokens] * len(prompts)
    if MOST in batch.data:
        mosts = batch[MOST].values.tolist()
    return [Request(*each) for each in zip(prompts, seeds, mosts, strict=True)]


def sampling_of(order: Order) -> dict[str, Any]:
    """How all of an order are drawn, in the words of vLLM and of OpenAI's API."""
    params = order.params
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_tokens": params.min_new_tokens,
        "stop_token_ids": list(params.stop_ids),
        "stop": list(order.stop_strings),
    }


def samples_of(
    engine: Engine,
    batch: SampleBatch,
    requests: Sequence[Request],
    answers: Sequence[tuple[list[int], list[float], str]],
    order: Order,
) -> SampleBatch:
    """The samples by the keys of `generate`.

    answers  tokens, their log-probabilities, and what ended them: "length" where they are cut off
    order    where it records what could be drawn, only its first tokens lack some: the configuration refuses top-k
             and top-p then
    """
    stops, early = order.params.stop_ids, order.params.min_new_tokens
    types: dict[str, torch.dtype] = {
        "input_ids": torch.int64,
        "response_mask": torch.bool,
        "old_logprobs": engine.dtype_of_rows,
        "truncated": torch.bool,
    }
    if order.record_kept:
        types |= dict.fromkeys(("kept_counts", "kept_tokens"), torch.int32)
    parts: dict[str, list[Tensor]] = {key: [] for key in types}
    for (prompt, *_), (tokens, logprobs, reason) in zip(requests, answers, strict=True):
        sample = {
            "input_ids": [*prompt, *tokens],
            "response_mask": [False] * len(prompt) + [True] * len(tokens),
            "old_logprobs": [0.0] * len(prompt) + logprobs,
            "truncated": [reason == "length"],
        }
        if order.record_kept:
            first = min(early, len(tokens))
            counts = [0] * len(prompt) + [-len(stops)] * first + [0] * (len(tokens) - first)
            sample |= {"kept_counts": counts, "kept_tokens": [*stops] * first}
        for key, values in sample.items():
            parts[key].append(torch.tensor(values, dtype=types[key]))
    lengths = [len(ids) for ids in parts["input_ids"]]
    new_tokens = sum(lengths) - sum(len(request.prompt) for request in requests)
    engine.count(generation_flops(engine.layout.shape, lengths, new_tokens, engine.layout.lora))
    device = batch["prompt_ids"].values.device
    packed = {
        key: Packed.of(of) if of else Packed(torch.empty(0, dtype=types[key]), ())
        for key, of in parts.items()
    }
    return SampleBatch(batch.ids, {key: of.to(device) for key, of in packed.items()})
