"""The checks of `bench.gpu`: the engine beside transformers, and ways of it that must agree with each other.

All run on any device but those that say CUDA. Models are small, with random weights, in float32 (without TF32)
and bfloat16.
"""

import os
from collections.abc import Callable, Iterable
from operator import ne
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from bench.models import (
    LEARNING_RATE,
    OPTIMIZER,
    batch_of,
    build_engine,
    random_tokens,
    sizes,
    training,
)
from prefect_rlhf.flows.cluster.this_machine import described_gpus
from prefect_rlhf.planner.pricing.devices import device_of
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import micro_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.parallel.comm.host_memory import HostCopy, copier
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import generate
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams, uniform
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Recompute
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

VOCAB, GROUP = 4096, 4
TINY = sizes(256, 4, 8, 2, 768, VOCAB, head_dim=64)
SMALL = sizes(256, 4, 4, 2, 512, VOCAB, head_dim=64)
EXPERTS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=128, norm_topk_prob=True
    ),
}


class Check(NamedTuple):
    """One comparison; it holds when value <= bound."""

    name: str
    value: float
    bound: float

    def __str__(self) -> str:
        verdict = "ok  " if self.value <= self.bound else "FAIL"
        return f"{verdict} {self.name:<60}{self.value:12.3g}  bound {self.bound:g}"


def checks(groups: ProcessGroups) -> list[Check]:
    """groups: of a world of one rank, on the device to check"""
    torch.backends.cuda.matmul.allow_tf32 = False
    device = groups.device
    sequences = random_tokens([5, 130, 33, 64, 1, 90], VOCAB)
    exact, rough = (
        build_model(LlamaConfig(**TINY), dtype, device) for dtype in (torch.float32, torch.bfloat16)
    )
    truth = _plain_logits(exact, sequences)
    ours = difference(_engine_logits(build_engine(rough, groups), sequences), truth)
    theirs = difference(_plain_logits(rough, sequences), truth)
    logits = difference(_engine_logits(build_engine(exact, groups), sequences), truth)
    found = [
        Check("logits, fp32", logits, 1e-5),
        Check("logits, bf16: error / error of transformers", ours / theirs, 1.5),
    ]
    for name, model, bound in (("fp32", exact, 1e-4), ("bf16", rough, 0.1)):
        error = _decode_error(build_engine(model, groups))
        found.append(Check(f"cached decode - full forward, log-probs, {name}", error, bound))
    found.append(Check("greedy tokens unlike transformers', fp32", _greedy_mismatches(exact, groups), 0))
    found += _train_checks(exact, groups, sequences)
    if device.type == "cuda":
        found += [_description_is_torchs(device), _uniforms_equal_the_cpu(device)]
        found.append(_offloaded_elements_unlike_resident(rough, groups, sequences))
    found += _unlike_when_done_again(rough, groups)
    small = build_model(LlamaConfig(**SMALL), torch.float32, device)
    found += [*_generation_checks(build_engine(small, groups)), *_way_checks(small, groups)]
    for name, config in EXPERTS.items():
        model = build_model(config, torch.float32, device)
        ours, theirs = _engine_logits(build_engine(model, groups), sequences), _plain_logits(model, sequences)
        found.append(Check(f"experts, {name}: logits", difference(ours, theirs), 1e-4))
    return found


def build_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model with random weights, the same in every call."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest element."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


# What transformers does


def plain_generation(
    model: PreTrainedModel, prompts: list[Tensor], new_tokens: int, do_sample: bool = True
) -> Callable[[], Tensor]:
    """transformers' `generate` on prompts of one length."""
    tokens = torch.stack(prompts).to(model.device)

    @torch.inference_mode()
    def run() -> Tensor:
        sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}
        return model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, pad_token_id=0,
            eos_token_id=None, do_sample=do_sample, **sampling,
        )  # fmt: skip

    return run


def plain_training(
    model: PreTrainedModel, sequences: list[Tensor], micro_batches: int, autocast: bool
) -> Callable[[], tuple[float, float]]:
    """`training` with transformers' model: padded micro-batches of similar lengths, float32 weights."""
    ordered = sorted(sequences, key=len)
    size = -(-len(ordered) // micro_batches)
    denominator = sum(len(s) - 1 for s in sequences)
    batches = []
    for part in (ordered[i : i + size] for i in range(0, len(ordered), size)):
        longest = len(part[-1])
        tokens = torch.stack([F.pad(s, (0, longest - len(s))) for s in part]).to(model.device)
        mask = torch.stack([F.pad(torch.ones_like(s), (0, longest - len(s))) for s in part]).to(model.device)
        batches.append((tokens, mask, tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=OPTIMIZER.betas, weight_decay=0.0, fused=True
    )

    def run() -> tuple[float, float]:
        total = 0.0
        for tokens, mask, targets in batches:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
                logits = model(tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            (loss / denominator).backward()
            total += float(loss.detach())
            del logits, loss
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total / denominator, float(norm)

    return run


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    return torch.cat([model(s[None].to(model.device), use_cache=False).logits[0] for s in sequences])


# What the engine does beside it


@torch.inference_mode()
def _engine_logits(engine: Engine, sequences: list[Tensor]) -> Tensor:
    micro = micro_batch(batch_of("input_ids", sequences, engine.device))
    return engine.stage(micro.input_ids, micro)


def _logprobs(engine: Engine, samples: SampleBatch) -> Tensor:
    micro = micro_batch(samples)
    with torch.no_grad():
        return engine.logprobs(engine.stage(micro.input_ids, micro), micro)


def drawn(engine: Engine, prompts: list[Tensor], params: SamplingParams) -> SampleBatch:
    samples = generate(engine, batch_of("prompt_ids", prompts, engine.device), params, seed=0, iteration=0)
    assert samples is not None
    return samples


def _decode_error(engine: Engine) -> float:
    """Mean difference between the log-probabilities that sampling reports and those of a full forward pass.

    The responses have many lengths, so that batch sizes and spans change and graphs are captured again.
    """
    prompts = random_tokens([7, 250, 40, 3, 120, 64, 9, 11] * 2, VOCAB)
    samples = drawn(engine, prompts, SamplingParams(max_new_tokens=300, stop_ids=tuple(range(0, VOCAB, 100))))
    mask = samples["response_mask"].values
    return float((samples["old_logprobs"].values - _logprobs(engine, samples))[mask].abs().mean())


def _greedy_mismatches(model: PreTrainedModel, groups: ProcessGroups) -> float:
    prompts = random_tokens([24] * 8, VOCAB)
    samples = drawn(build_engine(model, groups), prompts, SamplingParams(max_new_tokens=64, temperature=0.0))
    theirs = plain_generation(model, prompts, 64, do_sample=False)()
    return float((torch.stack(samples["input_ids"].split()) != theirs).sum())


def _train_checks(model: PreTrainedModel, groups: ProcessGroups, sequences: list[Tensor]) -> list[Check]:
    engine = build_engine(model, groups)
    report = training(engine, sequences, micro_batches=2)()
    loss, norm = plain_training(model, sequences, micro_batches=2, autocast=False)()
    weights = dict(model.named_parameters())
    moved = [
        (mine - weights[name]).detach().abs().mean() for name, mine in engine.stage.named_slices().items()
    ]
    return [
        Check("train step, fp32: loss", abs(report[0] / loss - 1), 1e-5),
        Check("train step, fp32: gradient norm", abs(report[1] / norm - 1), 1e-4),
        # AdamW's first step moves each weight by its gradient's sign. Where that is noise, single weights differ.
        Check("train step, fp32: weights, mean / learning rate", float(max(moved)) / LEARNING_RATE, 1e-2),
    ]


# CUDA


def _description_is_torchs(device: torch.device) -> Check:
    gpu, known = described_gpus(os.environ)[0], torch.cuda.get_device_properties(device)
    ours = gpu.name, gpu.memory_bytes, *gpu.capability, gpu.multiprocessors
    theirs = known.name, known.total_memory, known.major, known.minor, known.multi_processor_count
    print(f"{gpu}: {device_of(gpu).name}", flush=True)
    return Check("figures of the driver's description unlike torch's", sum(map(ne, ours, theirs)), 0)


def _uniforms_equal_the_cpu(device: torch.device) -> Check:
    ids, positions = torch.arange(1000)[:, None], torch.arange(100)
    on_cpu = uniform(3, "rollout", 5, ids, positions)
    on_gpu = uniform(3, "rollout", 5, ids.to(device), positions.to(device))
    return Check("random numbers unlike the CPU's", float((on_cpu != on_gpu.cpu()).sum()), 0)


def _offloaded_elements_unlike_resident(
    model: PreTrainedModel, groups: ProcessGroups, sequences: list[Tensor]
) -> Check:
    """Two steps with the optimizer's state on the device, and two with it in host memory, and the parameters between
    the steps."""
    copies, states = copier(groups.device), []
    for kept in (None, copies):
        engine = build_engine(model, groups, kept)
        assert engine.master is not None
        master, parameters = engine.master, None
        if kept is not None:
            parameters = HostCopy([master.weights], lambda own, m=master: m.use(*own), kept, changes=True)
        for _ in range(2):
            if parameters is not None:
                parameters.onload()
                parameters.wait()
            training(engine, sequences, micro_batches=2)()
            if parameters is not None:
                parameters.offload()
        states.append([shard.tensor.cpu() for shard in engine.master.shard_state()])
    copies.close()
    unlike = sum(int((mine != theirs).sum()) for mine, theirs in zip(*states, strict=True))
    return Check("two steps, offloaded optimizer: elements unlike a resident one's", unlike, 0)


# Ways that must agree


def _unlike_when_done_again(model: PreTrainedModel, groups: ProcessGroups) -> list[Check]:
    """Tokens that are drawn with the same random numbers, and two steps on long sequences, each three times."""
    prompts, tokens, states = random_tokens([128] * 128, VOCAB), [], []
    for _ in range(3):
        engine = build_engine(model, groups)
        tokens.append(drawn(engine, prompts, SamplingParams(max_new_tokens=256))["input_ids"].values)
        work = training(engine, random_tokens([1500] * 8, VOCAB), micro_batches=2)
        for _ in range(2):
            work()
        assert engine.master is not None
        states.append(torch.cat([shard.tensor for shard in engine.master.shard_state()]))
    return [
        Check(f"{name} unlike when done again", sum(int((one != all_[0]).sum()) for one in all_[1:]), 0)
        for name, all_ in (("generation, bf16: tokens", tokens), ("training, bf16: elements", states))
    ]


def _generation_checks(engine: Engine) -> list[Check]:
    """Refilled slots beside a slot for each, prompts read in pieces beside whole, for a group beside one by one."""
    prompts = random_tokens([7, 200, 40, 3, 120, 64, 9, 11], VOCAB)
    grouped = [prompt for prompt in prompts for _ in range(GROUP)]
    ids = range(len(grouped))
    params = SamplingParams(max_new_tokens=160, stop_ids=tuple(range(0, VOCAB, 50)))

    def samples(rows: Iterable[int] = ids, **how: Any) -> dict[int, Tensor]:
        """Sample -> tokens."""
        mine = tuple(rows)
        packed = Packed.of([grouped[i] for i in mine]).to(engine.device)
        batch = generate(
            engine, SampleBatch(mine, {"prompt_ids": packed}), params, seed=0, iteration=0, **how
        )
        assert batch is not None
        return dict(zip(batch.ids, batch["input_ids"].split(), strict=True))

    expected = samples()
    alone = {i: row for k in range(GROUP) for i, row in samples(range(k, len(grouped), GROUP)).items()}
    ways = {
        "refills: samples unlike those of a slot for each": samples(micro_batches=5),
        "chunks: samples unlike those of whole prompts": samples(prefill_tokens=48),
        "prompts: samples unlike those that read their own": alone,
    }
    return [
        Check(name, sum(not torch.equal(found[i], expected[i]) for i in ids), 0)
        for name, found in ways.items()
    ]


def _way_checks(model: PreTrainedModel, groups: ProcessGroups) -> list[Check]:
    """Prompts that samples share beside repeated ones; recomputed layers beside layers that are kept."""
    prompts = [prompt for prompt in random_tokens([96] * 4, VOCAB) for _ in range(GROUP)]
    answers = random_tokens([30 + 5 * i for i in range(len(prompts))], VOCAB, seed=2)
    rows = [torch.cat(both) for both in zip(prompts, answers, strict=True)]

    def step(recompute: Recompute = "none") -> tuple[Tensor, Tensor]:
        """(log-probabilities before a step, loss and gradient norm of the step)."""
        engine = build_engine(model, groups, recompute=recompute)
        before = _logprobs(engine, batch_of("input_ids", rows, engine.device))
        return before, torch.tensor(training(engine, rows, 1)())

    logps, report = step()
    with patch("prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch.LEAST_SHARED", 10**9):
        repeated_logps, repeated = step()
    return [
        Check("prompts: log-probabilities, shared and repeated", difference(logps, repeated_logps), 1e-5),
        Check("prompts: loss and gradient norm, shared and repeated", difference(report, repeated), 1e-5),
        *(
            Check(f"recompute {way}: loss and gradient norm", difference(step(way)[1], report), 1e-5)
            for way in ("selective", "full")
        ),
    ]
