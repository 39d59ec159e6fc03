"""Every train and inference function gives the same on 2 and 4 ranks as on one, decisions included."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.configurations import RunConfig, make_config
from prefect_rlhf.rlhf_tasks.algorithms.functions import load_functions
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.parallel.batch.redistribution import share_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.transfers import partition
from prefect_rlhf.rlhf_tasks.parallel.model.context_parallel import ContextRanks
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import OptimizerSettings
from tests.tiny_models import held_slices, shape_of, tiny_config, tiny_model

pytestmark = pytest.mark.dist

N_SEQS = 8
LEARNT_FROM_ROWS = ("sft", "reward_model", "dpo", "kto")
STRATEGIES = [(2, 2, 1), (2, 1, 2), (1, 1, 2, 2)]
SIMPLER = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (1, 1, 1, 2)]
"""Splits of one kind, which those above have together with another one: for the slow suite."""
OPTIMIZER = {"learning_rate": 5e-3, "warmup_steps": 2, "max_grad_norm": 0.5}


OPTIONS = {
    "sampling": {"max_completion_length": 8, "temperature": 0.8, "top_p": 0.9},
    "truncated_responses": "bootstrap",
    "dual_clip": 1.05,
}


SKIP: dict[str, Any] = {"on_reward_error": "skip"}
TOKENS: dict[str, Any] = {"rewards": [{"function": "m:f", "per": "token"}]}


def config_of(kind: str, options: dict[str, Any]) -> RunConfig:
    document: dict[str, Any] = {
        "type": kind,
        "models": {"actor": "a"},
        "data": {"train": "d"},
        "dtype": "float64",
        "batch_size": N_SEQS,
        "num_mini_batches": 2,
        "total_iterations": 3,
        "optimizer": OPTIMIZER,
        "seed": 5,
    }
    if kind not in (*LEARNT_FROM_ROWS, "distillation"):
        document |= {
            "sampling": {"max_completion_length": 8, "temperature": 0.8},
            "rewards": [{"function": "m:f"}],
        }
    if kind == "ppo":
        document |= {
            "num_ppo_epochs": 2,
            "kl_target": 0.5,
            "kl_horizon": 50,
            "normalize_values": True,
            "early_stop_ratio": 1.02,
        }
    elif kind == "distillation":
        document |= {
            "models": {"actor": "a", "teacher": "t"},
            "sampling": {"max_completion_length": 8, "temperature": 0.8},
        }
    return make_config(document | options)


def samples(kind: str) -> SampleBatch:
    """An iteration's samples with all keys that its calls read."""
    draw = torch.Generator().manual_seed(11)

    def tokens(length: int) -> Tensor:
        return torch.randint(3, 61, (length,), generator=draw)

    def numbers(length: int, scale: float) -> Tensor:
        return scale * torch.randn(length, generator=draw, dtype=torch.float64)

    def likely(masks: list[Tensor]) -> list[Tensor]:
        return [-6.0 * mask.sum() + numbers(1, 3.0) for mask in masks]

    lengths = [4 + (3 * i) % 7 for i in range(N_SEQS)]
    masks = [torch.arange(length) >= 2 for length in lengths]
    if kind in ("reward_model", "dpo"):
        parts = {key: [tokens(n) for n in order] for key, order in _pairs(lengths).items()}
        parts["margin"] = [numbers(1, 0.5) for _ in masks]
        if kind == "dpo":
            parts |= {"chosen_mask": masks, "rejected_mask": masks[::-1]}
            parts |= {key: likely(masks) for key in ("ref_chosen_logps", "ref_rejected_logps")}
    else:
        parts = {"input_ids": [tokens(n) for n in lengths], "response_mask": masks}
    if kind == "kto":
        parts |= {"mismatched_ids": [tokens(n) for n in lengths[::-1]], "mismatched_mask": masks[::-1]}
        parts |= {"ref_logps": likely(masks), "ref_mismatched_logps": likely(masks[::-1])}
        parts["desirable"] = [torch.tensor([i % 3 > 0]) for i in range(N_SEQS)]
    if kind == "distillation":
        for key in ("old_logprobs", "teacher_logprobs"):
            parts[key] = [torch.where(m, -4.2 + numbers(len(m), 0.3), 0.0) for m in masks]
    elif kind not in LEARNT_FROM_ROWS:
        for key, offset, scale in (
            ("old_logprobs", -4.2, 0.3),
            ("ref_logprobs", -4.2, 0.3),
            ("values", 0, 1.0),
        ):
            parts[key] = [torch.where(m, offset + numbers(len(m), scale), 0.0) for m in masks]
        parts["scores"] = [numbers(1, 2.0) for _ in masks]
        parts["scores"][3] = parts["scores"][2]  # a group of two without anything to compare
        parts["greedy_scores"] = [numbers(1, 1.0) for _ in masks]
        parts["truncated"] = [torch.tensor([i % 3 == 0]) for i in range(N_SEQS)]
        parts["stays"] = [torch.tensor([i not in (2, 6, 7)]) for i in range(N_SEQS)]  # 6, 7: a whole dp rank
        parts["drawn_by"] = [torch.where(m, 2 + i % 2, -1) for i, m in enumerate(masks)]
        parts["proximal_logprobs"] = [torch.where(m, -4.2 + numbers(len(m), 0.3), 0.0) for m in masks]
        parts["token_rewards"] = [torch.where(m, numbers(len(m), 1.0), 0.0) for m in masks]
        parts["greedy_stays"] = [torch.tensor([i != 4]) for i in range(N_SEQS)]
        parts["final_values"] = [numbers(1, 1.0) for _ in masks]
        kept = [[_kept(int(t), i + p) for p, t in enumerate(ids)] for i, ids in enumerate(parts["input_ids"])]
        parts["kept_counts"] = [
            torch.tensor([len(tokens) for tokens in sample]) * mask
            for sample, mask in zip(kept, masks, strict=True)
        ]
        parts["kept_tokens"] = [torch.cat(sample[2:]) for sample in kept]
    return SampleBatch(tuple(range(N_SEQS)), {key: Packed.of(values) for key, values in parts.items()})


def _kept(token: int, n: int) -> Tensor:
    """Some tokens of the vocabulary, this one among them."""
    return torch.tensor(sorted({token, *range(n % 5, 61, 3 + n % 4)}))


def _pairs(lengths: list[int]) -> dict[str, list[int]]:
    return {"chosen_ids": lengths, "rejected_ids": lengths[::-1]}


def engine_on(rank: int, strategy: tuple[int, ...], head: Head) -> Engine:
    config = tiny_config("llama")
    placement = Placement(tuple(range(ParallelStrategy(*strategy).size)), ParallelStrategy(*strategy))
    layout = Layout(shape_of(config), head, placement)
    groups = ProcessGroups(device_sets(placement), 240.0, torch.device("cpu"))
    stage = Stage(
        config,
        layout,
        placement.coordinate(rank),
        groups[placement.tp_group(rank)],
        device=torch.device("cpu"),
        dtype=torch.float64,
        context=ContextRanks.of(layout, groups),
    )
    whole = tiny_model(config, head, torch.float64).state_dict()
    with torch.no_grad():
        for name, mine in held_slices(layout, rank, whole).items():
            stage.named_slices()[name].copy_(mine)
    settings = OptimizerSettings((0.9, 0.95), eps=1e-8, weight_decay=0.0, max_grad_norm=0.5)
    return Engine(stage, layout, groups, settings)


def run_calls(
    rank: int,
    world: int,
    strategy: tuple[int, ...],
    kind: str,
    calls: tuple[str, ...],
    head: Head,
    options: dict[str, Any],
    balance: Literal["count", "tokens"] = "count",
):
    """Two iterations of some calls on one engine: metrics, rows of the outputs, weights' sums, state."""
    torch.set_num_threads(1)
    engine = engine_on(rank, strategy, head)
    engine.version = 3
    config, whole = config_of(kind, options), samples(kind)
    if kind != "sft":
        read = {key for call in algorithm(kind).calls(config) if call.name in calls for key in call.inputs}
        whole = SampleBatch(whole.ids, {key: whole[key] for key in read})
    metrics, rows = [], {}
    for iteration in range(2):
        shifted = SampleBatch(tuple(N_SEQS * iteration + i for i in whole.ids), whole.data)
        dealt = partition(
            shifted.ids, strategy[0], balance, config.num_mini_batches, tokens_of(shifted), config.group_size
        )
        mine = dealt[engine.coordinate.dp]
        mine = shifted.reorder(mine) if engine.is_head else None
        batch = share_batch(mine, engine.placement, engine.groups)
        for name in calls:
            nothing: Any = SimpleNamespace()
            context = CallContext(
                config, iteration, N_SEQS * iteration, N_SEQS, 2, nothing, nothing, Path(), str, tuple
            )
            output: CallOutput = load_functions(algorithm(kind), [name])[name](engine, batch, context)
            metrics.append(dict(output.metrics))
            for key, packed in output.batch.data.items() if output.batch else ():
                rows |= {
                    (key, i): part.tolist() for i, part in zip(output.batch.ids, packed.split(), strict=True)
                }
    return metrics, rows, dict(engine.state)


def tokens_of(batch: SampleBatch) -> dict[int, int]:
    key = "input_ids" if "input_ids" in batch.data else "chosen_ids"
    return dict(zip(batch.ids, batch[key].lengths, strict=True))


CASES = [
    ("ppo", ("ref_inference", "actor_train"), "lm", {}),
    ("ppo", ("critic_inference", "critic_train"), "scalar", {}),
    ("ppo", ("ref_inference", "actor_train"), "lm", OPTIONS),
    ("ppo", ("critic_inference", "critic_train"), "scalar", OPTIONS),
    ("ppo", ("ref_inference", "actor_train"), "lm", SKIP | OPTIONS),
    ("ppo", ("critic_inference", "critic_train"), "scalar", SKIP | OPTIONS | TOKENS),
    ("sft", ("actor_train",), "lm", {}),
    ("reward_model", ("reward_train",), "scalar", {}),
    ("dpo", ("ref_inference", "actor_train"), "lm", {}),
    ("dpo", ("ref_inference", "actor_train"), "lm", {"loss_type": "ipo"}),
    ("kto", ("ref_inference", "actor_train"), "lm", {"undesirable_weight": 1.5}),
    ("distillation", ("teacher_inference", "actor_train"), "lm", {}),
]


def _marks(kind: str, options: dict[str, Any]) -> Any:
    if options and kind != "ppo":
        return pytest.mark.slow
    return pytest.mark.whole if options or kind not in ("ppo", "dpo") else ()


MARKED = [pytest.param(*case, marks=_marks(case[0], case[3])) for case in CASES]
"""The default suite runs PPO and DPO without options; options other than PPO's are for the slow suite."""


def _case_id(value: Any) -> str:
    if isinstance(value, dict):
        return "options" if value else "defaults"
    return value if isinstance(value, str) else "+".join(value)


@pytest.mark.parametrize(
    "strategies", [STRATEGIES, pytest.param(SIMPLER, marks=pytest.mark.slow)], ids=["covering", "simpler"]
)
@pytest.mark.parametrize(("kind", "calls", "head", "options"), MARKED, ids=_case_id)
def test_functions_do_not_depend_on_the_layout(
    ranks: Any,
    kind: str,
    calls: tuple[str, ...],
    head: Head,
    options: dict[str, Any],
    strategies: list[tuple[int, ...]],
):
    metrics, rows, state = ranks.run(1, run_calls, (1, 1, 1), kind, calls, head, options)[0]
    for strategy in strategies:
        size = ParallelStrategy(*strategy).size
        results = ranks.run(size, run_calls, strategy, kind, calls, head, options)
        found = {}
        for rank_metrics, rank_rows, rank_state in results:
            for one, other in zip(metrics, rank_metrics, strict=True):
                assert other == pytest.approx(one, rel=1e-9, abs=1e-12), strategy
            assert flat(rank_state) == pytest.approx(flat(state), rel=1e-12), strategy
            found |= rank_rows
        assert found.keys() == rows.keys()
        for key, values in rows.items():
            assert found[key] == pytest.approx(values, rel=1e-9, abs=1e-12), (strategy, key)


CRITIC_FREE: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"num_generations": 2, "beta": 0.1, "scale_rewards": "batch", "num_iterations": 2}),
    ("grpo", {"num_generations": 2, "filter_groups": True, "beta": 0.1}),
    ("dapo", {"num_generations": 2, "mask_truncated_completions": True}),
    ("gspo", {"num_generations": 4, "epsilon": 0.1, "epsilon_high": 0.2, "num_iterations": 2}),
    (
        "rloo",
        {
            "num_generations": 2,
            "epsilon": 0.99,
            "epsilon_high": 99.0,
            "sampling": {"max_completion_length": 8, "top_k": 9},
        },
    ),
    ("remax", {"epsilon_high": 0.3}),
    ("reinforce_pp", {"gamma": 0.9}),
    ("reinforce_pp", {"num_generations": 2, "baseline": "group"}),
    ("expert_iteration", {"num_generations": 2, "min_score": 0.0, "best_of_group": True}),
    ("grpo", SKIP | {"num_generations": 2, "beta": 0.1, "scale_rewards": "batch", "num_iterations": 2}),
    ("dapo", SKIP | {"num_generations": 4, "mask_truncated_completions": True}),
    ("rloo", SKIP | {"num_generations": 4, "epsilon": 0.99, "epsilon_high": 99.0}),
    ("remax", SKIP | TOKENS),
    ("reinforce_pp", TOKENS | {"gamma": 0.9}),
    ("reinforce_pp", SKIP | {"num_generations": 2, "baseline": "group"}),
    ("expert_iteration", SKIP | {"num_generations": 4, "min_score": 0.0, "best_of_group": True}),
    ("gspo", {"num_generations": 2, "staleness": 1, "correction": {"upper": 1.02}, "num_mini_batches": 1}),
    (
        "grpo",
        {
            "num_generations": 2,
            "correction": {"kind": "masked", "level": "geometric", "upper": 1.02, "veto": 0.5},
        },
    ),
]
"""Algorithms with one train call, and options that make it communicate."""


def runs_of(
    rank: int, world: int, strategy: tuple[int, ...], balance: Literal["count", "tokens"]
) -> list[Any]:
    """What `run_calls` gives for each of `CRITIC_FREE`, all in one go."""
    return [
        run_calls(rank, world, strategy, kind, ("actor_train",), "lm", options, balance)
        for kind, options in CRITIC_FREE
    ]


@pytest.mark.parametrize(
    ("strategy", "balance"),
    [
        pytest.param((2, 1, 2), "tokens", marks=pytest.mark.whole),
        pytest.param((1, 2, 2), "count", marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 2), "tokens", marks=pytest.mark.slow),
    ],
)
def test_algorithms_without_a_critic_do_not_depend_on_the_layout(ranks: Any, strategy, balance):
    alone = ranks.run(1, runs_of, (1, 1, 1), "count")[0]
    for (kind, _), (metrics, _, _) in zip(CRITIC_FREE, alone, strict=True):
        assert all(m["grad_norm/actor"] > 1e-3 for m in metrics), f"{kind} learned nothing"
    for of_rank in ranks.run(ParallelStrategy(*strategy).size, runs_of, strategy, balance):
        for (kind, _), (metrics, _, _), (found, _, _) in zip(CRITIC_FREE, alone, of_rank, strict=True):
            for one, other in zip(metrics, found, strict=True):
                assert other == pytest.approx(one, rel=1e-9, abs=1e-12), kind


def flat(state: dict[str, Any]) -> dict[str, float]:
    return {
        f"{key}.{k}": v
        for key, value in state.items()
        for k, v in (value if isinstance(value, dict) else {"": value}).items()
    }


def test_the_cases_reach_what_they_should(ranks: Any):
    """Early stopping, the adaptive coefficient and value normalisation really happen in them."""
    metrics, _, state = ranks.run(1, run_calls, (1, 1, 1), *CASES[0])[0]
    assert min(m["policy/steps"] for m in metrics if "policy/steps" in m) < 4
    assert state["kl_coef"] != 0.05
    _, _, state = ranks.run(1, run_calls, (1, 1, 1), *CASES[1])[0]
    assert state["value_norm"]["weight"] > 0
    assert state["kl_coef"] != 0.05
    (kto,) = [case for case in CASES if case[0] == "kto"]
    metrics, _, _ = ranks.run(1, run_calls, (1, 1, 1), *kto)[0]
    assert min(m["kl"] for m in metrics if m) > 0


@pytest.mark.parametrize("case", [0, 1])
def test_each_option_changes_what_is_learnt(ranks: Any, case: int):
    kind, calls, head, _ = CASES[case]
    loss = ("loss/policy", "loss/value")[case]
    elsewhere = {"dual_clip": 1, "sampling": 1}  # the other role does not know of it

    def learnt(options: dict[str, Any]) -> float:
        metrics, _, _ = ranks.run(1, run_calls, (1, 1, 1), kind, calls, head, options)[0]
        return metrics[1][loss]

    plain = learnt({})
    for option, value in OPTIONS.items():
        assert (plain == learnt({option: value})) == (elsewhere.get(option) == case), option
