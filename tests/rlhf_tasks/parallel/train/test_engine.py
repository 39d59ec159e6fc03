"""Engines of 1, 2 and 4 ranks against plain transformers and torch's AdamW in one process."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy
from tests.rlhf_tasks.parallel.train.trials import (
    EVERY,
    LORA,
    SHARDED,
    Trial,
    assert_equal,
    expected_of,
    some,
    train,
    trial_of,
    way,
)
from tests.tiny_models import by_our_names, held_slices, tiny_config, tiny_model

pytestmark = pytest.mark.dist

ALMOST_EVERY = some((1, 2, 2), whole=[(1, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1)], slow=EVERY)
TIED = some((1, 2, 2), whole=[(1, 1, 2), (1, 4, 1), (2, 2, 1)], slow=EVERY)
VALUES = some((2, 1, 2), whole=[(1, 1, 1), (4, 1, 1), (1, 2, 2)], slow=EVERY)
ROUNDED = some((2, 2, 1), whole=[(1, 1, 1), (1, 2, 2)], slow=EVERY)
SPLIT_AND_WHOLE = some((1, 2, 2), whole=[(1, 1, 1)])


@pytest.mark.parametrize(
    ("model", "head", "strategy", "how"),
    [
        *way("plain", "llama", some((1, 1, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2), whole=EVERY)),
        *way("tied weights and norms of heads", "qwen3-tied", TIED),
        *way("tied weights", "llama-tied", SPLIT_AND_WHOLE),
        *way("norms of heads", "qwen3", SPLIT_AND_WHOLE),
        *way("values", "qwen3-tied", VALUES, "scalar"),
        *way("float32", "llama-tied", ROUNDED, dtype=torch.float32),
        *way("experts", "mixtral", ALMOST_EVERY),
        *way("experts with biases, and sinks", "gpt_oss", some((1, 2, 2), whole=[(1, 1, 1), (2, 2, 1)])),
        *way("packed and transposed projections", "gpt2", some((1, 2, 2), whole=EVERY)),
        *way(
            "context",
            "llama",
            some((1, 1, 1, 4), (1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 1, 2), whole=[(1, 1, 1, 2)]),
        ),
        *way("context of tied weights", "qwen3-tied", some((1, 1, 2, 2), (1, 1, 1, 4))),
        *way(
            "context of values",
            "qwen3-tied",
            some((1, 1, 1, 4), whole=[(1, 2, 1, 2), (1, 1, 2, 2)]),
            "scalar",
        ),
        *way("context of experts", "mixtral", some((1, 1, 1, 2), whole=[(1, 2, 1, 2)])),
        *way("context of sinks", "gpt_oss", some((1, 1, 1, 4), whole=[(1, 2, 1, 2)])),
        *way("context in float32", "llama-tied", some((1, 1, 1, 2)), dtype=torch.float32),
        *way("context of packed projections", "gpt2", some((1, 1, 1, 2))),
        *(
            case
            for recompute in ("none", "selective", "full")
            for case in way(
                f"context of adapters, recomputation {recompute}",
                "qwen3-tied",
                some((1, 2, 1, 2)),
                recompute=recompute,
                lora=LORA,
            )
        ),
        *way("micro-batches: 1", "llama", some((2, 1, 2), slow=[(1, 1, 1)]), micro_batches=1),
        *way("micro-batches: 3", "llama", some((2, 1, 2), (1, 1, 1)), micro_batches=3),
        *way("micro-batches: 7", "llama", some((2, 1, 2), slow=[(1, 1, 1)]), micro_batches=7),
        *way(
            "replicas with different numbers of micro-batches",
            "llama",
            some((2, 1, 2), whole=[(1, 1, 1), (2, 1, 1), (4, 1, 1)]),
            micro_batches=1,
            micro_batch_tokens=9,
        ),
        *way("adapters", "qwen3-tied", ALMOST_EVERY, lora=LORA),
        *(
            case
            for targets in [("k_proj", "down_proj"), ("o_proj",)]
            for case in way(
                f"values and adapters of {' and '.join(targets)}",
                "llama",
                SPLIT_AND_WHOLE,
                "scalar",
                lora=replace(LORA, targets=targets),
            )
        ),
        *way(
            "sharded",
            "llama",
            some((4, 1, 1, 1, SHARDED), whole=[(2, 1, 1, 1, SHARDED), (2, 2, 1, 1, SHARDED)]),
        ),
        *way("sharded", "qwen3-tied", some((2, 2, 1, 1, SHARDED), whole=[(4, 1, 1, 1, SHARDED)])),
        *way("sharded values", "qwen3-tied", some((2, 1, 1, 1, SHARDED)), "scalar", micro_batches=3),
        *way("sharded experts", "mixtral", some((4, 1, 1, 1, SHARDED), whole=[(2, 2, 1, 1, SHARDED)])),
        *way("sharded context", "qwen3-tied", some((1, 1, 1, 2, SHARDED), (2, 1, 1, 2, SHARDED))),
        *way("sharded, packed", "gpt2", some((2, 1, 1, 1, SHARDED))),
        *way(
            "sharded, with different numbers of micro-batches",
            "llama-tied",
            some((2, 1, 1, 1, SHARDED)),
            micro_batches=1,
            micro_batch_tokens=9,
        ),
        *(
            case
            for recompute in ("none", "selective", "full")
            for lora in (None, LORA)
            if recompute != "none" or lora
            for case in way(
                f"sharded, {recompute} recomputation{' with adapters' if lora else ''}",
                "qwen3-tied",
                some((2, 1, 1, 1, SHARDED), whole=[(4, 1, 1, 1, SHARDED)]),
                recompute=recompute,
                lora=lora,
            )
        ),
        *(
            case
            for recompute, lora in [("selective", None), ("selective", LORA), ("full", LORA)]
            for case in way(
                f"{recompute} recomputation{' with adapters' if lora else ''}",
                "qwen3-tied",
                some((1, 2, 2), slow=[(1, 2, 1), (2, 1, 1)]),
                recompute=recompute,
                lora=lora,
            )
        ),
    ],
)
def test_training_equals_plain_transformers(ranks, model: str, head: Head, strategy, how: dict) -> None:
    """To rounding: in float64, but for one."""
    dtype = how.get("dtype", torch.float64)
    trial = trial_of(model, head, strategy, **how)
    expected = expected_of(model, head, dtype, trial.lora)
    bounds = (1e-5, 1e-5) if dtype == torch.float32 else (1e-10, 1e-9)
    assert_equal(ranks.run(strategy.size, train, trial), trial, expected, *bounds)


ON_Q_AND_V = Lora(3, 5.0, ("q_proj", "v_proj"))
"""Of families whose first layers do not attend: there is nothing to train before layer 1."""


def _of_family(family: str, lora: Lora | None) -> Trial:
    """A tiny model with the weights of transformers' own, and random adapters, on one rank."""
    config, generator = tiny_config(family), torch.Generator().manual_seed(3)
    trial = Trial(config, "lm", {}, ParallelStrategy(), lora=lora)
    model = tiny_model(config).double()
    weights = by_our_names(trial.layout.whole, model, model.state_dict())
    for spec in trial.layout.parameters if lora else ():
        weights[spec.name] = 0.1 * torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    return replace(trial, weights=weights)


@pytest.mark.parametrize(
    ("family", "lora", "degrees"),
    [
        ("gemma4_text", None, (2, 1, 1, 1, SHARDED)),
        ("gemma4_text", None, (1, 1, 1, 2, SHARDED)),
        ("gemma4_text", ON_Q_AND_V, (2, 1, 1, 1, SHARDED)),
        ("gemma4_text", ON_Q_AND_V, (1, 1, 1, 2)),
        ("gemma4_text", ON_Q_AND_V, (1, 1, 1, 2, SHARDED)),
        pytest.param("gemma4_text", None, (1, 1, 1, 2), marks=pytest.mark.whole),
        pytest.param("gemma4_text", ON_Q_AND_V, (1, 2, 1, 1), marks=pytest.mark.whole),
        ("qwen3_next", ON_Q_AND_V, (4, 1, 1, 1, SHARDED)),
        ("lfm2", ON_Q_AND_V, (2, 1, 1, 1, SHARDED)),
        ("deepseek_v3", None, (2, 1, 1, 1, SHARDED)),
        ("gemma3_text", None, (1, 2, 1, 2, SHARDED)),
    ],
)
def test_divided_weights_and_tokens_of_any_family_train_as_whole_ones(ranks, family, lora, degrees) -> None:
    """On one rank. Of four replicas one has no samples: it gathers what the backward passes of the others gather."""
    plain = _of_family(family, lora)
    ((rows, _, metrics, _, weights, _),) = ranks.run(1, train, plain)
    trial = replace(plain, strategy=ParallelStrategy(*degrees))
    for rank, (of_rank, _, steps, _, after, changed) in enumerate(
        ranks.run(trial.strategy.size, train, trial)
    ):
        assert not changed, "weights below adapters"
        assert steps == [pytest.approx(step, rel=1e-9) for step in metrics]
        for sample, values in (of_rank or {}).items():
            assert_close(values, rows[sample], rtol=1e-9, atol=1e-10)
        for name, weight in held_slices(trial.layout, rank, weights).items():
            assert_close(after[name], weight, rtol=0, atol=1e-9 * weight.abs().max().item())
