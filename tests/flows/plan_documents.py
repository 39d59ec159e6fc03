"""Configurations to plan with, profiles of their model, and what a refusal looks like."""

from typing import Any

from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.pricing.figures import MeasuredProfile
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from tests.planner.sampled import as_measured

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
    "host_memory_bytes",
    "search",
    "corrections",
}
DISJOINT = {
    "actor_generate": "0",
    "reward_inference": "1",
    "ref_inference": "0",
    "critic_inference": "1",
    "actor_train": "0",
    "critic_train": "1 m2",
}


def ppo(**changes: Any) -> dict[str, Any]:
    """A sound configuration for planning on 1x2 that names no file that exists."""
    document = {
        "type": "ppo",
        "dtype": "float32",
        "models": {"actor": LLAMA, "reward": LLAMA},
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
    profile = as_measured(shape, Cluster(n_hosts, 2), slower)
    return profile.model_copy(update={"device": device})


def refused(outcome: tuple[int, str, str], *parts: str) -> None:
    status, out, err = outcome
    assert status == 2, (out, err)
    assert all(line.startswith(" " * len("error: ")) for line in err.splitlines()[1:]), err
    assert err.startswith("error: ")
    for part in parts:
        assert part in err, err
