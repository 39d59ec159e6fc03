"""Sharded weights of ours beside `torch.distributed.fsdp.fully_shard` (FSDP2) and whole ones, on two CPU ranks.

    python -m bench.sharded [--hidden 512] [--layers 8] [--rounds 5]

The same Llama (float32, vocabulary of 4096), the same 8 sequences of 128 tokens in two micro-batches, AdamW; one
thread a rank; a layer is a unit of FSDP2, as of ours. The three take turns. For each it prints the median of its
steps and the losses (of FSDP2 those of the first rank's samples), then whether whole and sharded weights of ours have
the same bits.
"""

import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from bench.harness import Store, on_ranks, options
from bench.models import CPU, LEARNING_RATE, OPTIMIZER, random_tokens, sizes, training
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets, join_world
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement, Shard
from prefect_rlhf.rlhf_tasks.parallel.model.shares import Shares
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

RANKS, SEQUENCES, TOKENS = 2, 8, 128


def ours(rank: int, whole: LlamaForCausalLM, shard: Shard):
    """A step of our engine, and its weights."""
    placement = Placement(tuple(range(RANKS)), ParallelStrategy(dp=RANKS, shard=shard))
    groups = ProcessGroups(device_sets(placement), 600.0, CPU)
    layout = Layout(ModelShape.from_config(whole.config.to_dict()), "lm", placement)
    shares = Shares(layout, groups, torch.float32) if shard == "parameters" else None
    stage = Stage(
        whole.config, layout, placement.coordinate(rank), None, device=CPU, dtype=torch.float32, shares=shares
    )
    weights = whole.state_dict()
    for name in layout.specs:
        stage.fill(name, weights[name])
    engine = Engine(stage, layout, groups, OPTIMIZER)
    mine = random_tokens([TOKENS] * SEQUENCES, 4096)[rank::RANKS]
    step = training(engine, mine, 2)
    return lambda: step()[0] / RANKS, engine


def fsdp2(rank: int, whole: LlamaForCausalLM):
    """A step of FSDP2 on the same samples."""
    model = LlamaForCausalLM(whole.config)
    model.load_state_dict(whole.state_dict())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    mine = torch.stack(random_tokens([TOKENS] * SEQUENCES, 4096)[rank::RANKS])

    def step() -> float:
        total = 0.0
        for tokens in mine.chunk(2):
            loss = model(input_ids=tokens, labels=tokens).loss / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def measure(rank: int, store: Store, config: LlamaConfig, rounds: int):
    host, port, prefix = store
    tcp = dist.TCPStore(host, port, is_master=False)
    join_world(dist.PrefixStore(prefix, tcp), rank, RANKS, 600.0, CPU)
    torch.manual_seed(0)
    whole = LlamaForCausalLM(config)
    (step_2, engine_2), (step_3, engine_3) = ours(rank, whole, "gradients"), ours(rank, whole, "parameters")
    steps = {"ours, whole weights": step_2, "ours, sharded": step_3, "FSDP2": fsdp2(rank, whole)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            losses[name].append(step())
            seconds[name].append(time.perf_counter() - began)
    with engine_3.whole_weights():
        pairs = zip(engine_2.stage.parameters(), engine_3.stage.parameters(), strict=True)
        same = all(torch.equal(a, b) for a, b in pairs)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}, losses, same


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    config = LlamaConfig(**sizes(given.hidden, given.layers, 8, 8, given.hidden * 11 // 4, 4096))
    seconds, losses, same = on_ranks(RANKS, measure, config, given.rounds)[0]
    for name, each in seconds.items():
        print(f"{name:<20} {each:7.3f} s a step; losses {' '.join(f'{loss:.6f}' for loss in losses[name])}")
    print(f"whole and sharded weights of ours have the same bits: {same}")


if __name__ == "__main__":
    main()
