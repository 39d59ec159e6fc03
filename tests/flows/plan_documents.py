"""Configurations to plan with, profiles of their model, and what a refusal looks like."""

from typing import Any

from planner.measured import MeasuredProfile
from planner.profile import preset
from planner.sizes import sizes
from planner.timing import Roofline
from rlhf_tasks.measurements import Measurements, Timed, TimedExchange
from rlhf_tasks.parallel.shape import ModelShape
from tests.planner.sampled import EXCHANGES, sampled_operations

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
KEYS = {
    "iteration_time_s",
    "lower_bound_s",
    "gap",
    "proven_optimal",
    "proof_class",
    "device_classes",
    "source",
    "assignments",
    "transfers",
    "peak_memory_bytes",
    "search",
    "corrections",
}
DISJOINT = {
    "actor_generate": {"devices": [0]},
    "reward_inference": {"devices": [1]},
    "ref_inference": {"devices": [0]},
    "critic_inference": {"devices": [1]},
    "actor_train": {"devices": [0]},
    "critic_train": {"devices": [1], "micro_batches": 2},
}


def ppo(**changes: Any) -> dict[str, Any]:
    """A sound configuration for planning on 1x2 that names no file that exists."""
    document = {
        "type": "ppo",
        "models": {"actor": {"config": LLAMA}, "reward": {"config": LLAMA}},
        "data": {"train": "nowhere.jsonl"},
        "output_dir": "nowhere",  # where no profiles are: those in ./runs would change what is planned
        "sampling": {"max_completion_length": 16},
        "batch_size": 8,
        "num_mini_batches": 2,
        "total_iterations": 100,
        "cluster": {"devices_per_host": 2},
        "planning": {"prompt_tokens": 16},
    }
    return {**document, **changes}


SHAPE = ModelShape.from_config(LLAMA)


def measured(shape=SHAPE, device="cpu-slot", n_hosts=1, slower=1.0) -> MeasuredProfile:
    """A profile of hosts with two slots that are so much slower than a CPU slot by its figures."""
    roofline = Roofline(preset("cpu-slot"), sizes(shape, "lm", 1), "lm", 1, False, 4)
    operations = [
        Timed(operation=operation, tp=tp, tokens=tokens, context=context, seconds=slower * seconds)
        for tp in (1, 2)
        for operation, tokens, context, seconds in sampled_operations(shape, tp)
    ]
    exchanges = [
        TimedExchange(
            kind=kind,
            ranks=2,
            crosses_hosts=False,
            size_bytes=size_bytes,
            seconds=slower * roofline.exchange_s(kind, 2, size_bytes, False),
        )
        for kind in EXCHANGES
        for size_bytes in (0, 2**24)
    ]
    found = Measurements(operations=tuple(operations), exchanges=tuple(exchanges), process_bytes=10**8)
    return MeasuredProfile.of(device, n_hosts, 2, shape, 4, [found])


def refused(outcome: tuple[int, str, str], *parts: str) -> None:
    status, out, err = outcome
    assert status == 2, (out, err)
    assert err.count("\n") == 1, err
    assert err.startswith("error: ")
    for part in parts:
        assert part in err, err
