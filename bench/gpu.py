"""Checks the engine on one CUDA GPU, and compares its speed with plain transformers.

    python -m bench.gpu --out FILE.json [--size 1b] [--rounds 3] [--peak-flops 989e12]

It needs no server and no cluster. The checks use a small model in float32 (without TF32) and bfloat16; those of
bench/paths.py are among them. The timings use a Llama of about one billion parameters with random weights, in
bfloat16. Exit status 1 when a check fails.

Timings are wall-clock seconds after a warm-up, with the device synchronised before and after; medians over the
rounds. MFU counts 6 FLOPs per parameter and token, plus for causal attention 6 x layers x width FLOPs per token and
earlier token, relative to the given peak (989e12: NVIDIA's data sheet, H100 SXM, dense bfloat16).
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.engine import BETAS, LEARNING_RATE, MAX_GRAD_NORM, build_engine
from bench.harness import Spread, in_turn, options, seconds_of
from bench.paths import Check, difference, path_checks
from flows.cluster.this_machine import described_gpus
from planner.pricing.devices import device_of
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch, micro_batch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.comm.groups import ProcessGroups, join_world, leave_world
from rlhf_tasks.parallel.comm.host_memory import HostCopy, copier
from rlhf_tasks.parallel.generate.generation import generate
from rlhf_tasks.parallel.generate.sampling import SamplingParams, uniform
from rlhf_tasks.parallel.layout.topology import ParallelStrategy
from rlhf_tasks.parallel.train.engine import Engine, LossTerms

CUDA = torch.device("cuda", 0)
SIZES = {
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
        "vocab_size": 4096,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
    },
}


class Timing(NamedTuple):
    """One row of the table: median seconds for `tokens` useful tokens; MFU as a fraction, for training only."""

    name: str
    tokens: int
    seconds: float
    mfu: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def build_model(size: str, dtype: torch.dtype) -> PreTrainedModel:
    """A Llama with random weights on the GPU, the same in every call."""
    config = LlamaConfig(
        **SIZES[size], tie_word_embeddings=True, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with CUDA:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def random_tokens(lengths: list[int], vocab: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocab, (length,), generator=generator) for length in lengths]


def batch_of(key: str, sequences: list[Tensor]) -> SampleBatch:
    return SampleBatch(tuple(range(len(sequences))), {key: Packed.of(sequences).to(CUDA)})


# Checks


def checks(groups: ProcessGroups) -> list[Check]:
    torch.backends.cuda.matmul.allow_tf32 = False
    sequences = random_tokens([5, 130, 33, 64, 1, 90], 4096)
    exact = build_model("tiny", torch.float32)
    rough = build_model("tiny", torch.bfloat16)
    found = [_description_is_torchs(), _uniforms_equal_the_cpu()]
    truth = _plain_logits(exact, sequences)
    found.append(Check("logits, fp32", difference(_engine_logits(exact, groups, sequences), truth), 1e-5))
    ours = difference(_engine_logits(rough, groups, sequences), truth)
    theirs = difference(_plain_logits(rough, sequences), truth)
    found.append(Check("logits, bf16: error / error of transformers", ours / theirs, 1.5))
    for name, model, bound in (("fp32", exact, 1e-4), ("bf16", rough, 0.1)):
        engine = build_engine(model, ParallelStrategy(), groups, model.dtype)
        found.append(Check(f"cached decode - full forward, log-probs, {name}", _decode_error(engine), bound))
    found.append(Check("greedy tokens unlike transformers', fp32", _greedy_mismatches(exact, groups), 0))
    found += _train_checks(exact, groups, sequences)
    found.append(_offloaded_elements_unlike_resident(rough, groups, sequences))
    found += _unlike_when_done_again(rough, groups)
    found += path_checks(groups)
    return found


def _description_is_torchs() -> Check:
    gpu, known = described_gpus(os.environ)[0], torch.cuda.get_device_properties(CUDA)
    ours = gpu.name, gpu.memory_bytes, *gpu.capability, gpu.multiprocessors
    theirs = known.name, known.total_memory, known.major, known.minor, known.multi_processor_count
    print(f"{gpu}: {device_of(gpu).name}", flush=True)
    return Check("figures of the driver's description unlike torch's", sum(map(ne, ours, theirs)), 0)


def _uniforms_equal_the_cpu() -> Check:
    ids, positions = torch.arange(1000)[:, None], torch.arange(100)
    on_cpu = uniform(3, "rollout", 5, ids, positions)
    on_gpu = uniform(3, "rollout", 5, ids.to(CUDA), positions.to(CUDA))
    return Check("random numbers unlike the CPU's", float((on_cpu != on_gpu.cpu()).sum()), 0)


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    return torch.cat([model(s[None].to(CUDA), use_cache=False).logits[0] for s in sequences])


@torch.inference_mode()
def _engine_logits(model: PreTrainedModel, groups: ProcessGroups, sequences: list[Tensor]) -> Tensor:
    micro = micro_batch(batch_of("input_ids", sequences))
    return build_engine(model, ParallelStrategy(), groups, model.dtype).stage(micro.input_ids, micro)


def _decode_error(engine: Engine) -> float:
    """Mean difference between the log-probabilities that sampling reports and those of a full forward pass.

    The responses have many lengths, so that batch sizes and spans change and graphs are captured again.
    """
    prompts = random_tokens([7, 250, 40, 3, 120, 64, 9, 11] * 2, 4096)
    params = SamplingParams(max_new_tokens=300, stop_ids=tuple(range(0, 4096, 100)))
    samples = generate(engine, batch_of("prompt_ids", prompts), params, seed=0, iteration=0)
    assert samples is not None
    micro = micro_batch(samples)
    with torch.no_grad():
        expected = engine.logprobs(engine.stage(micro.input_ids, micro), micro)
    mask = samples["response_mask"].values
    return float((samples["old_logprobs"].values - expected)[mask].abs().mean())


def _greedy_mismatches(model: PreTrainedModel, groups: ProcessGroups) -> float:
    prompts = random_tokens([24] * 8, 4096)
    engine = build_engine(model, ParallelStrategy(), groups, model.dtype)
    params = SamplingParams(max_new_tokens=64, temperature=0.0)
    samples = generate(engine, batch_of("prompt_ids", prompts), params, seed=0, iteration=0)
    assert samples is not None
    ours = torch.stack(samples["input_ids"].split())
    theirs = plain_generation(model, prompts, 64, do_sample=False)()
    return float((ours != theirs).sum())


def _train_checks(model: PreTrainedModel, groups: ProcessGroups, sequences: list[Tensor]) -> list[Check]:
    engine = build_engine(model, ParallelStrategy(), groups, torch.float32)
    report = engine_training(engine, sequences, micro_batches=2)()
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


def _offloaded_elements_unlike_resident(
    model: PreTrainedModel, groups: ProcessGroups, sequences: list[Tensor]
) -> Check:
    """Two steps with the optimizer's state on the device, and two with it in host memory, and the parameters between
    the steps."""
    copies, states = copier(CUDA), []
    for kept in (None, copies):
        engine = build_engine(model, ParallelStrategy(), groups, torch.bfloat16, copies=kept)
        assert engine.master is not None
        master, parameters = engine.master, None
        if kept is not None:
            parameters = HostCopy([master.weights], lambda own, m=master: m.use(*own), kept, changes=True)
        for _ in range(2):
            if parameters is not None:
                parameters.onload()
                parameters.wait()
            engine_training(engine, sequences, micro_batches=2)()
            if parameters is not None:
                parameters.offload()
        states.append([shard.tensor.cpu() for shard in engine.master.shard_state()])
    copies.close()
    unlike = sum(int((mine != theirs).sum()) for mine, theirs in zip(*states, strict=True))
    return Check("two steps, offloaded optimizer: elements unlike a resident one's", unlike, 0)


def _unlike_when_done_again(model: PreTrainedModel, groups: ProcessGroups) -> list[Check]:
    """Tokens that are drawn with the same random numbers, and two steps on long sequences, each three times."""
    prompts, drawn, states = random_tokens([128] * 128, 4096), [], []
    for _ in range(3):
        engine = build_engine(model, ParallelStrategy(), groups, torch.bfloat16)
        params = SamplingParams(max_new_tokens=256)
        samples = generate(engine, batch_of("prompt_ids", prompts), params, seed=0, iteration=0)
        assert samples is not None
        drawn.append(samples["input_ids"].values)
        work = engine_training(engine, random_tokens([1500] * 8, 4096), micro_batches=2)
        for _ in range(2):
            work()
        assert engine.master is not None
        states.append(torch.cat([shard.tensor for shard in engine.master.shard_state()]))
    return [
        Check(f"{name} unlike when done again", sum(int((one != all_[0]).sum()) for one in all_[1:]), 0)
        for name, all_ in (("generation, bf16: tokens", drawn), ("training, bf16: elements", states))
    ]


# Work to time


def plain_generation(
    model: PreTrainedModel, prompts: list[Tensor], new_tokens: int, do_sample: bool = True
) -> Callable[[], Tensor]:
    """transformers' `generate` on prompts of one length."""
    tokens = torch.stack(prompts).to(CUDA)

    @torch.inference_mode()
    def run() -> Tensor:
        sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}
        return model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, pad_token_id=0,
            eos_token_id=None, do_sample=do_sample, **sampling,
        )  # fmt: skip

    return run


def engine_generation(engine: Engine, prompts: list[Tensor], new_tokens: int) -> Callable[[], Any]:
    batch, params = batch_of("prompt_ids", prompts), SamplingParams(max_new_tokens=new_tokens)
    return lambda: generate(engine, batch, params, seed=0, iteration=0)


def engine_training(
    engine: Engine, sequences: list[Tensor], micro_batches: int
) -> Callable[[], tuple[float, float]]:
    """One optimizer step of next-token prediction. Returns loss and gradient norm."""
    batch = batch_of("input_ids", sequences)
    denominator = float(sum(len(s) - 1 for s in sequences))

    def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
        return LossTerms(-engine.logprobs(logits, micro).sum(), {})

    def run() -> tuple[float, float]:
        report = engine.train_step(batch, loss, denominator, micro_batches, LEARNING_RATE)
        return report["loss"], report["grad_norm"]

    return run


def plain_training(
    model: PreTrainedModel, sequences: list[Tensor], micro_batches: int, autocast: bool
) -> Callable[[], tuple[float, float]]:
    """The same step with transformers' model: padded micro-batches of similar lengths, float32 weights."""
    ordered = sorted(sequences, key=len)
    size = -(-len(ordered) // micro_batches)
    denominator = sum(len(s) - 1 for s in sequences)
    batches = []
    for part in (ordered[i : i + size] for i in range(0, len(ordered), size)):
        longest = len(part[-1])
        tokens = torch.stack([F.pad(s, (0, longest - len(s))) for s in part]).to(CUDA)
        mask = torch.stack([F.pad(torch.ones_like(s), (0, longest - len(s))) for s in part]).to(CUDA)
        batches.append((tokens, mask, tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True
    )

    def run() -> tuple[float, float]:
        total = 0.0
        for tokens, mask, targets in batches:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                logits = model(tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            (loss / denominator).backward()
            total += float(loss.detach())
            del logits, loss
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total / denominator, float(norm)

    return run


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """Median wall-clock seconds, after one warm-up."""

    def done() -> None:
        work()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return Spread.of(in_turn({"": partial(seconds_of, done)}, rounds, warm_up=1)[""]).median


# Timings


def timings(groups: ProcessGroups, size: str, rounds: int, peak_flops: float) -> list[Timing]:
    return [*_time_generation(groups, size, rounds), *_time_training(groups, size, rounds, peak_flops)]


def _time_generation(groups: ProcessGroups, size: str, rounds: int) -> list[Timing]:
    model = build_model(size, torch.bfloat16)
    engine = build_engine(model, ParallelStrategy(), groups, torch.bfloat16)
    engine.master = None
    found = []
    for sequences in (8, 64, 256):
        prompts, new_tokens = random_tokens([128] * sequences, model.config.vocab_size), 256
        for name, work in (
            ("transformers", plain_generation(model, prompts, new_tokens)),
            ("engine", engine_generation(engine, prompts, new_tokens)),
        ):
            taken = seconds(work, rounds)
            found.append(
                Timing(f"generation {sequences} x {new_tokens}, {name}", sequences * new_tokens, taken)
            )
    return found


def _time_training(groups: ProcessGroups, size: str, rounds: int, peak_flops: float) -> list[Timing]:
    lengths = [256 + (1792 * i) // 15 for i in range(16)]
    sequences, micro_batches = random_tokens(lengths, SIZES[size]["vocab_size"]), 8
    model = build_model(size, torch.bfloat16)
    flops = _training_flops(model, lengths)
    engine = build_engine(model, ParallelStrategy(), groups, torch.bfloat16)
    del model
    ours = seconds(engine_training(engine, sequences, micro_batches), rounds)
    del engine
    torch.cuda.empty_cache()
    copies = copier(CUDA)
    engine = build_engine(
        build_model(size, torch.bfloat16), ParallelStrategy(), groups, torch.bfloat16, copies=copies
    )
    offloaded = seconds(engine_training(engine, sequences, micro_batches), rounds)
    copies.close()
    del engine
    torch.cuda.empty_cache()
    plain = build_model(size, torch.float32).train()
    theirs = seconds(plain_training(plain, sequences, micro_batches, autocast=True), rounds)
    rows = (
        ("transformers, autocast", theirs),
        ("engine", ours),
        ("engine, optimizer in host memory", offloaded),
    )
    return [Timing(f"training, {name}", sum(lengths), s, flops / s / peak_flops) for name, s in rows]


def _training_flops(model: PreTrainedModel, lengths: list[int]) -> float:
    config = model.config
    dense = 6 * sum(p.numel() for p in model.parameters()) * sum(lengths)
    width = config.num_attention_heads * config.head_dim
    return float(dense + 6 * config.num_hidden_layers * width * sum(n * n for n in lengths))


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak-flops", type=float, default=989e12, help="of the device, dense bfloat16")
    arguments = parser.parse_args()
    join_world(dist.HashStore(), 0, 1, timeout_s=600.0, device=CUDA)
    groups = ProcessGroups([(0,)], 600.0, CUDA)
    checked = checks(groups)
    for check in checked:
        print(check, flush=True)
    timed = timings(groups, arguments.size, arguments.rounds, arguments.peak_flops)
    for timing in timed:
        mfu = "" if timing.mfu is None else f"   MFU {timing.mfu:.1%}"
        print(f"{timing.name:<44}{timing.tokens_per_s:12.0f} tokens/s{mfu}")
    free_bytes, all_bytes = torch.cuda.mem_get_info(CUDA)
    result = {
        "device": torch.cuda.get_device_name(CUDA),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(CUDA),
        "context_bytes": all_bytes - free_bytes - torch.cuda.memory_reserved(CUDA),
        "fragmentation": 1 - torch.cuda.max_memory_allocated(CUDA) / torch.cuda.max_memory_reserved(CUDA),
        "checks": [check._asdict() for check in checked],
        "timings": [{**timing._asdict(), "tokens_per_s": timing.tokens_per_s} for timing in timed],
    }
    arguments.out.write_text(json.dumps(result, indent=1))
    leave_world()
    return int(any(check.value > check.bound for check in checked))


if __name__ == "__main__":
    sys.exit(main())
