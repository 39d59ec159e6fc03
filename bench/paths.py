"""Checks ways of the engine that must agree with each other, on one device.

    python -m bench.paths [--device cpu]

    refills     slots that sequences leave and enter, beside a slot for each
    chunks      prompts that are read in pieces, beside whole ones
    prompts     a prompt that samples share, read or computed once, beside once for each
    recompute   layers that are computed again in the backward pass, beside layers that are kept
    experts     mixtures of experts beside transformers

All in float32, on small models with random weights. `bench.gpu` has the same checks. Exit status 1 when one fails.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from bench.engine import LEARNING_RATE, build_engine
from bench.harness import options
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch, micro_batch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.comm.groups import ProcessGroups, join_world, leave_world
from rlhf_tasks.parallel.generate.generation import generate
from rlhf_tasks.parallel.generate.sampling import SamplingParams
from rlhf_tasks.parallel.layout.shape import ModelShape
from rlhf_tasks.parallel.layout.slices import Interval, Layout
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.model.stage import Stage
from rlhf_tasks.parallel.model.weights import stored_rows
from rlhf_tasks.parallel.train.engine import Engine, LossTerms

VOCAB = 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUP = 4
STOPS = tuple(range(0, VOCAB, 50))


class Check(NamedTuple):
    """One comparison; it holds when value <= bound."""

    name: str
    value: float
    bound: float

    def __str__(self) -> str:
        verdict = "ok  " if self.value <= self.bound else "FAIL"
        return f"{verdict} {self.name:<60}{self.value:12.3g}  bound {self.bound:g}"


def path_checks(groups: ProcessGroups) -> list[Check]:
    """groups: of a world of one rank, on the device to check"""
    model = random_model(LlamaConfig(**SIZES), groups.device)
    return [
        *_generation_checks(build_engine(model, ParallelStrategy(), groups, torch.float32)),
        *_training_checks(model, groups),
        *(_experts_check(name, config, groups) for name, config in EXPERTS.items()),
    ]


def random_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest element."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


# Generation


def _generation_checks(engine: Engine) -> list[Check]:
    draw = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(1, VOCAB, (length,), generator=draw) for length in (7, 200, 40, 3, 120, 64, 9, 11)
    ]
    grouped = [prompt for prompt in prompts for _ in range(GROUP)]
    ids = range(len(grouped))

    def drawn(rows: Iterator[int] | range = ids, **how: Any) -> dict[int, Tensor]:
        """Sample -> tokens."""
        mine = list(rows)
        packed = Packed.of([grouped[i] for i in mine]).to(engine.device)
        params = SamplingParams(max_new_tokens=160, stop_ids=STOPS)
        batch = SampleBatch(tuple(mine), {"prompt_ids": packed})
        samples = generate(engine, batch, params, seed=0, iteration=0, **how)
        assert samples is not None
        return dict(zip(samples.ids, samples["input_ids"].split(), strict=True))

    expected = drawn()
    alone = {i: row for k in range(GROUP) for i, row in drawn(range(k, len(grouped), GROUP)).items()}
    ways = {
        "refills: samples unlike those of a slot for each": drawn(micro_batches=5),
        "chunks: samples unlike those of whole prompts": drawn(prefill_tokens=48),
        "prompts: samples unlike those that read their own": alone,
    }
    return [
        Check(name, sum(not torch.equal(found[i], expected[i]) for i in ids), 0)
        for name, found in ways.items()
    ]


# Training and inference


@contextmanager
def _nothing_shared() -> Iterator[None]:
    with patch("rlhf_tasks.parallel.batch.micro_batch.LEAST_SHARED", 10**9):
        yield


def _training_checks(model: PreTrainedModel, groups: ProcessGroups) -> list[Check]:
    draw = torch.Generator().manual_seed(2)
    prompts = torch.randint(1, VOCAB, (4, 96), generator=draw).repeat_interleave(GROUP, 0)
    answers = [torch.randint(1, VOCAB, (30 + 5 * i,), generator=draw) for i in range(len(prompts))]
    rows = [torch.cat(both) for both in zip(prompts, answers, strict=True)]
    batch = SampleBatch(tuple(range(len(rows))), {"input_ids": Packed.of(rows).to(groups.device)})

    def step(recompute: str = "none") -> tuple[Tensor, Tensor]:
        """(log-probabilities before a step, gradient norm and loss of the step)."""
        engine = build_engine(model, ParallelStrategy(), groups, torch.float32)
        engine.stage.recompute = recompute  # type: ignore[assignment]

        def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
            return LossTerms(-engine.logprobs(logits, micro).sum(), {})

        micro = micro_batch(batch)
        with torch.no_grad():
            before = engine.logprobs(engine.stage(micro.input_ids, micro), micro)
        report = engine.train_step(batch, loss, float(len(rows)), 1, LEARNING_RATE)
        return before, torch.tensor([report["loss"], report["grad_norm"]])

    logps, report = step()
    with _nothing_shared():
        repeated_logps, repeated = step()
    found = [
        Check("prompts: log-probabilities, shared and repeated", difference(logps, repeated_logps), 1e-5),
        Check("prompts: loss and gradient norm, shared and repeated", difference(report, repeated), 1e-5),
    ]
    for recompute in ("selective", "full"):
        again = difference(step(recompute)[1], report)
        found.append(Check(f"recompute {recompute}: loss and gradient norm", again, 1e-5))
    return found


# Experts

EXPERTS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=128, norm_topk_prob=True
    ),
}


@torch.inference_mode()
def _experts_check(name: str, config: PreTrainedConfig, groups: ProcessGroups) -> Check:
    """Logits of packed sequences beside those of each sequence alone."""
    model = random_model(config, groups.device)
    layout = Layout(ModelShape.from_config(config.to_dict()), "lm", Placement((0,), ParallelStrategy()))
    coordinate = layout.placement.coordinate(0)
    stage = Stage(config, layout, coordinate, None, device=groups.device, dtype=torch.float32)
    stored: dict[str, Tensor] = revert_weight_conversion(model, dict(model.named_parameters()))  # type: ignore[arg-type]
    specs = {spec.name: spec for spec in layout.parameters}
    for ours, mine in stage.named_slices().items():
        spec = specs[ours]
        mine.data.copy_(stored_rows(stored.__getitem__, spec, Interval(0, spec.length)))
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randint(1, VOCAB, (length,), generator=draw).to(groups.device) for length in (5, 130, 33)]
    micro = micro_batch(SampleBatch((0, 1, 2), {"input_ids": Packed.of(rows)}))
    theirs = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])
    return Check(f"experts, {name}: logits", difference(stage(micro.input_ids, micro), theirs), 1e-4)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = torch.device("cuda", 0) if parser.parse_args().device == "cuda" else torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    join_world(dist.HashStore(), 0, 1, timeout_s=600.0, device=device)
    checked = path_checks(ProcessGroups([(0,)], 600.0, device))
    leave_world()
    print("\n".join(map(str, checked)))
    return int(any(check.value > check.bound for check in checked))


if __name__ == "__main__":
    sys.exit(main())
