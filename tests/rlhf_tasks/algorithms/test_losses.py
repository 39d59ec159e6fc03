"""What algorithms without a critic minimise, against formulas written out sample by sample, gradients included."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefect_rlhf.rlhf_tasks.algorithms.configurations import RunConfig, make_config
from prefect_rlhf.rlhf_tasks.algorithms.functions import load_functions
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import Correction
from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch, split
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement

MOST = 6  # tokens of a response
BLOCKS = 2
VARIANTS: list[dict[str, Any]] = [
    {"type": "grpo"},
    {"type": "grpo", "beta": 0.1, "scale_rewards": "batch", "delta": 1.5},
    {"type": "grpo", "mask_truncated_completions": True},
    {"type": "dr_grpo", "beta": 0.2},
    {"type": "dapo", "mask_truncated_completions": True, "overlong_buffer": 0.5, "overlong_penalty": 2.0},
    {"type": "grpo", "filter_groups": True, "beta": 0.1},
    {"type": "dr_grpo", "filter_groups": True, "mask_truncated_completions": True, "beta": 0.1},
    {"type": "gspo", "epsilon": 0.1, "epsilon_high": 0.15},
    {"type": "gspo", "loss_type": "dapo", "beta": 0.1},
    {"type": "cispo", "epsilon_high": 0.2},
    {"type": "rloo", "num_generations": 2},
    {"type": "rloo", "importance_sampling_level": "token", "mask_truncated_completions": True},
    {"type": "remax"},
    {"type": "remax", "beta": 0.0, "epsilon_high": 0.4},
    {"type": "reinforce_pp", "gamma": 0.9},
    {"type": "reinforce_pp", "baseline": "group", "beta": 0.3},
    *(
        {"total_iterations": 2, "staleness": 1, **variant}
        for variant in (
            {"type": "grpo", "beta": 0.1},
            {"type": "dr_grpo", "correction": {"upper": 0.9}},
            {"type": "gspo", "correction": {"upper": 1.1}, "mask_truncated_completions": True},
            {"type": "rloo", "num_generations": 2},
            {"type": "reinforce_pp", "correction": {"kind": "none"}},
            {"type": "grpo", "correction": {"kind": "masked", "level": "token", "lower": 0.8, "upper": 1.25}},
            {"type": "grpo", "correction": {"level": "sequence", "lower": 0.7, "upper": 1.2}},
        )
    ),
    {"type": "grpo", "correction": {"kind": "masked", "level": "sequence", "lower": 0.6, "upper": 1.5}},
    {"type": "dr_grpo", "correction": {"kind": "masked", "level": "geometric", "lower": 0.9, "upper": 1.1}},
    {"type": "gspo", "correction": {"kind": "truncated", "level": "token", "veto": 0.7}},
    {"type": "reinforce_pp", "correction": {"kind": "masked", "upper": None, "veto": 0.8}},
    {"type": "expert_iteration", "min_score": 0.5},
    {"type": "expert_iteration", "best_of_group": True},
]


@dataclass
class Sample:
    """One sample: its prompt's tokens, and float64 log-probabilities [response tokens]; `new` needs a gradient.

    proximal  under the policy before the train_step, where an older one has drawn the sample
    version   that has drawn it, where that counts
    """

    prompt: int
    old: Tensor
    ref: Tensor
    new: Tensor
    proximal: Tensor
    score: float
    greedy_score: float
    truncated: bool
    version: int = 2

    def __len__(self) -> int:
        return len(self.old)


def drawn(seed: int, lengths: list[int], scores: list[float]) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def near(values: Tensor | float, n: int) -> Tensor:
        return values + 0.25 * torch.randn(n, dtype=torch.float64, generator=generator)

    samples = []
    for number, (length, score) in enumerate(zip(lengths, scores, strict=True)):
        old = near(-2.0, length)
        samples.append(
            Sample(
                prompt=1 + number % 3,
                old=old,
                ref=near(old, length),
                new=near(old, length).requires_grad_(),
                proximal=near(old, length),
                score=score,
                greedy_score=scores[-1 - number],
                truncated=length == MOST,
            )
        )
    return samples


def config_of(variant: dict[str, Any], n_seqs: int, size: int) -> RunConfig:
    sizes = {"num_generations": size} if variant["type"] != "remax" else {}
    document = {
        "models": {"actor": "m"},
        "data": {"train": "d"},
        "dtype": "float64",
        "sampling": {"max_completion_length": MOST},
        "rewards": [{"function": "m:f"}],
        "batch_size": n_seqs,
        "num_mini_batches": BLOCKS,
        "total_iterations": 1,
    }
    return make_config({**document, **sizes, **variant})


# The formulas, written out


def relative(scores: list[float], size: int) -> list[float]:
    found = []
    for first in range(0, len(scores), size):
        group = scores[first : first + size]
        mean = statistics.fmean(group)
        found += [score - mean if len(set(group)) > 1 else 0.0 for score in group]
    return found


def grpo_scores(config: Any, samples: list[Sample]) -> list[float]:
    scores = []
    for sample in samples:
        buffer = (config.overlong_buffer or 1) * MOST
        beyond = max(len(sample) - (MOST - buffer), 0) / buffer if config.overlong_buffer else 0
        scores.append(sample.score - config.overlong_penalty * beyond)
    return scores


def grpo_advantages(config: Any, samples: list[Sample]) -> list[list[float]]:
    scores = grpo_scores(config, samples)
    size = config.num_generations
    divisors = {
        "group": lambda at: statistics.stdev(scores[at // size * size : (at // size + 1) * size]) + 1e-4,
        "batch": lambda at: statistics.stdev(scores) + 1e-4,
        "none": lambda at: 1.0,
    }
    divisor = divisors[config.scale_rewards]
    found = [value / divisor(at) for at, value in enumerate(relative(scores, size))]
    return [[value] * len(sample) for value, sample in zip(found, samples, strict=True)]


def rloo_advantages(config: Any, samples: list[Sample]) -> list[list[float]]:
    size = config.num_generations
    scores = [s.score - config.beta * float((s.old - s.ref).sum()) for s in samples]
    found = []
    for at, score in enumerate(scores):
        first = at // size * size
        others = [scores[i] for i in range(first, first + size) if i != at]
        found.append([score - statistics.fmean(others)] * len(samples[at]))
    return found


def returns(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards))) for t in range(len(rewards))]


def token_rewards(sample: Sample, score: float, beta: float) -> list[float]:
    rewards = [-beta * kl for kl in (sample.old - sample.ref).tolist()]
    return [*rewards[:-1], rewards[-1] + score]


def remax_advantages(config: Any, samples: list[Sample]) -> list[list[float]]:
    return [returns(token_rewards(s, s.score - s.greedy_score, config.beta), 1.0) for s in samples]


def reinforce_advantages(config: Any, samples: list[Sample]) -> list[list[float]]:
    scores, beta = [s.score for s in samples], config.beta
    if config.baseline == "group":
        scores, beta = relative(scores, config.num_generations), 0.0
    found = [returns(token_rewards(s, x, beta), config.gamma) for s, x in zip(samples, scores, strict=True)]
    everything = [value for of_sample in found for value in of_sample]
    mean, std = statistics.fmean(everything), statistics.stdev(everything)
    return [[(value - mean) / (std + 1e-8) for value in of_sample] for of_sample in found]


ADVANTAGES = {"rloo": rloo_advantages, "remax": remax_advantages, "reinforce_pp": reinforce_advantages}


def weighted(correction: Correction, change: Tensor, of_actions: Callable[[Tensor], Tensor]) -> Tensor:
    """TRL's (grpo_trainer.py, 1.16) and verl's (rollout_corr_helper.py) weights of one response's tokens, written
    out: truncated or masked importance sampling, per token, over the sequence, or by its geometric mean; a veto."""
    same = torch.ones_like(change)
    logs = {"token": change, "sequence": change.sum() * same, "geometric": change.mean() * same}
    r = (logs[correction.level] if correction.level else of_actions(change)).exp()
    low, high = correction.lower or 0.0, correction.upper or math.inf
    weights = r.clamp(low, high) if correction.kind != "masked" else r * ((low <= r) & (r <= high))
    vetoed = correction.veto is not None and bool((change.exp() < correction.veto).any())
    return weights * (not vetoed)


def token_losses(config: Any, sample: Sample, advantages: list[float]) -> list[Tensor]:
    def of_actions(change: Tensor) -> Tensor:
        """Where a whole response is the action, all its tokens have its change."""
        if getattr(config, "importance_sampling_level", "token") != "sequence":
            return change
        return (change.sum() if config.type == "rloo" else change.mean()).expand(len(sample))

    weights = torch.ones(len(sample), dtype=torch.float64)
    proximal = sample.old
    correction = getattr(config, "corrects", None)
    if correction is not None:
        proximal = sample.proximal
        weights = weighted(correction, proximal - sample.old, of_actions)
    change = of_actions(sample.new - proximal)
    cispo = getattr(config, "loss_type", "") == "cispo"
    in_loss = {"reinforce_pp": "k2" if getattr(config, "baseline", "") == "group" else ""}
    estimator = in_loss.get(config.type, "" if config.type in ("rloo", "remax") else "k3")
    losses = []
    for t, advantage in enumerate(advantages):
        ratio = change[t].exp()
        if cispo:
            loss = -min(ratio.item(), 1 + config.high) * advantage * sample.new[t]
        else:
            bounded = ratio.clamp(1 - config.epsilon, 1 + config.high)
            free = ratio if getattr(config, "delta", None) is None else ratio.clamp(max=config.delta)
            loss = -torch.minimum(free * advantage, bounded * advantage)
        d = sample.new[t] - sample.ref[t]
        kl = {"k2": d**2 / 2, "k3": (-d).exp() - 1 + d, "": d * 0}[estimator]
        losses.append(weights[t] * (loss + config.beta * kl))
    return losses


def expected_loss(config: Any, samples: list[Sample], block: Sequence[int]) -> Tensor:
    """The loss of one mini-batch, whose samples are `block` of all samples."""
    if config.type == "expert_iteration":
        return expert_loss(config, samples, block)
    advantages = ADVANTAGES.get(config.type, grpo_advantages)(config, samples)
    learned = [i for i in block if not (config.mask_truncated_completions and samples[i].truncated)]
    of_samples = [torch.stack(token_losses(config, samples[i], advantages[i])) for i in learned]
    nothing = torch.zeros((), dtype=torch.float64)
    sums = sum((losses.sum() for losses in of_samples), nothing)
    kind = getattr(config, "loss_type", None)
    if config.type == "rloo":
        whole = config.importance_sampling_level == "sequence"
        return sum((x.mean() if whole else x.sum() for x in of_samples), nothing) / len(block)
    if kind == "grpo":
        return sum((losses.mean() for losses in of_samples), nothing) / max(len(block), 1)
    if kind == "dr_grpo":
        return sums / max(len(block) * MOST, 1)
    return sums / max(sum(map(len, of_samples)), 1)


def expert_loss(config: Any, samples: list[Sample], block: Sequence[int]) -> Tensor:
    size, chosen = config.num_generations, []
    for i in block:
        group = [samples[j].score for j in range(i // size * size, (i // size + 1) * size)]
        best = group.index(max(group)) == i % size
        if (best or not config.best_of_group) and samples[i].score >= (config.min_score or -math.inf):
            chosen.append(samples[i])
    total = sum((-sample.new.sum() for sample in chosen), torch.zeros((), dtype=torch.float64))
    return total / max(sum(map(len, chosen)), 1)


# The product's functions


class Recording:
    """An engine of one replica that trains nothing: its outputs are the samples' log-probabilities themselves.

    taken  (ids, loss, {id: gradient of the loss by the response's log-probabilities}) of each train step
    """

    is_head, device = True, torch.device("cpu")
    placement = Placement((0,), ParallelStrategy())
    coordinate = placement.coordinate(0)

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples
        self.state: dict[str, Any] = {}
        self.version = 3
        self._counted = None
        self.taken: list[tuple[set[int], float, dict[int, Tensor]]] = []

    def sum_over_dp(self, values: Tensor) -> Tensor:
        return values.double()

    def logprobs(self, logits: Tensor, micro: MicroBatch, temperature: float = 1.0) -> Tensor:
        return torch.where(
            micro.data[self._counted], logits, 0.0
        )  # as the engine: 0 where a token does not count

    def logprobs_and_entropy(self, logits: Tensor, micro: MicroBatch, temperature: float) -> Any:
        return logits, torch.zeros_like(logits)

    def inference(self, batch, output, micro_batches, counted) -> Packed:
        self._counted = counted
        rows = {}
        for micro in split(batch, micro_batches):
            outputs = torch.cat(
                [_with_prompt(self._samples[i], self._samples[i].new.detach()) for i in micro.ids]
            )
            rows.update(zip(micro.ids, micro.per_sample(output(outputs, micro)), strict=True))
        return Packed.of([rows[i] for i in batch.ids])

    def train_step(
        self, batch, loss, denominator, micro_batches, learning_rate, metrics=(), counted=None
    ) -> dict[str, float]:
        self._counted = counted
        total, sums, gradients = 0.0, dict.fromkeys(metrics, 0.0), {}
        for micro in split(batch, micro_batches):
            own = [self._samples[i] for i in micro.ids]
            outputs = torch.cat([_with_prompt(s, s.new.detach(), 7.0) for s in own]).requires_grad_()
            terms = loss(outputs, micro)
            (terms.total / denominator).backward()
            total += terms.total.item() / denominator
            sums = {name: value + float(terms.metrics[name]) for name, value in sums.items()}
            assert outputs.grad is not None
            for sample, number, gradient in zip(own, micro.ids, micro.per_sample(outputs.grad), strict=True):
                assert not gradient[: sample.prompt].any()
                gradients[number] = gradient[sample.prompt :]
        self.taken.append((set(batch.ids), total, gradients))
        return {**sums, "loss": total, "grad_norm": 0.0, "skipped": 0.0}


def _with_prompt(sample: Sample, values: Tensor, before: float = 0.0) -> Tensor:
    return torch.cat([torch.full((sample.prompt,), before, dtype=values.dtype), values])


def batch_of(samples: list[Sample]) -> SampleBatch:
    parts: dict[str, list[Tensor]] = {
        "input_ids": [torch.arange(s.prompt + len(s)) for s in samples],
        "response_mask": [_with_prompt(s, torch.ones(len(s), dtype=torch.bool)) for s in samples],
        "old_logprobs": [_with_prompt(s, s.old) for s in samples],
        "ref_logprobs": [_with_prompt(s, s.ref) for s in samples],
        "scores": [torch.tensor([s.score], dtype=torch.float64) for s in samples],
        "greedy_scores": [torch.tensor([s.greedy_score], dtype=torch.float64) for s in samples],
        "truncated": [torch.tensor([s.truncated]) for s in samples],
        "proximal_logprobs": [_with_prompt(s, s.proximal) for s in samples],
        "drawn_by": [_with_prompt(s, torch.full((len(s),), s.version), -1) for s in samples],
    }
    return SampleBatch(tuple(range(len(samples))), {key: Packed.of(values) for key, values in parts.items()})


def mini_batches(config: RunConfig, samples: list[Sample]) -> list[list[int]]:
    """The numbers of each mini-batch's samples: of all groups, or where groups are filtered of those that differ."""
    size = getattr(config, "num_generations", 1)
    groups = [list(range(first, first + size)) for first in range(0, len(samples), size)]
    if getattr(config, "filter_groups", False):
        groups = [group for group in groups if len({samples[i].score for i in group}) > 1]
    cuts = [number * len(groups) // BLOCKS for number in range(BLOCKS + 1)]
    return [[i for group in groups[a:b] for i in group] for a, b in pairwise(cuts)]


def trained(
    config: RunConfig, samples: list[Sample], micro_batches: int
) -> tuple[Recording, dict[str, float]]:
    """Carry out `actor_train`: what its steps minimised, and its metrics."""
    engine: Any = Recording(samples)
    record, nothing = algorithm(config.type), SimpleNamespace()
    read = next(call for call in record.calls(config) if call.name == "actor_train").inputs
    whole = batch_of(samples)
    batch = SampleBatch(whole.ids, {key: whole[key] for key in read})
    context = CallContext(config, 0, 0, len(samples), micro_batches, nothing, nothing, Path(), str, tuple)  # type: ignore[arg-type]
    output = load_functions(record, ["actor_train"])["actor_train"](engine, batch, context)
    return engine, dict(output.metrics)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
@given(st.integers(1, 2), st.integers(2, 3), st.integers(1, 4), st.integers(0, 2**16), st.data())
@settings(max_examples=25)
def test_losses_and_gradients_are_those_of_the_formulas(variant, groups, size, micro_batches, seed, data):
    size = variant.get("num_generations", size)
    n_seqs = BLOCKS * groups * size
    lengths = data.draw(st.lists(st.integers(1, MOST), min_size=n_seqs, max_size=n_seqs))
    values = st.sampled_from([0.0, 0.5, 1.0, -0.7])
    scores = data.draw(st.lists(values, min_size=n_seqs, max_size=n_seqs))
    samples = drawn(seed, lengths, scores)
    config = config_of(variant, n_seqs, size)

    engine, _ = trained(config, samples, micro_batches)

    blocks = mini_batches(config, samples)
    number_of = {i: number for number, block in enumerate(blocks) for i in block}
    steps = {number_of[min(ids)]: (loss, gradients) for ids, loss, gradients in engine.taken}
    for number, block in enumerate(blocks):
        expected = expected_loss(config, samples, block)
        if number not in steps:  # nothing to learn: no step
            assert not expected.requires_grad
            continue
        loss, gradients = steps[number]
        assert loss == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
        own = [samples[i].new for i in block]
        wanted = [None] * len(own)
        if expected.requires_grad:
            wanted = torch.autograd.grad(expected, own, allow_unused=True)
        for i, gradient in zip(block, wanted, strict=True):
            zeros = torch.zeros(len(samples[i]), dtype=torch.float64)
            torch.testing.assert_close(
                gradients.get(i, zeros), zeros if gradient is None else gradient, rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo", "rloo", "reinforce_pp"])
def test_a_train_step_of_one_optimizer_step_is_itself_the_pass_of_the_proximal_policy(kind):
    samples = drawn(7, [2, 4, 6, 3, 1, 5], [1.0, 0.0, 0.5, 1.0, 0.0, 1.0])
    for sample in samples:
        sample.proximal = sample.new.detach()
    one = {"staleness": 1, "total_iterations": 2, "correction": {"upper": 1.2}, "num_mini_batches": 1}
    config: Any = config_of({"type": kind, **one}, 6, 2)
    assert "actor_inference" not in [call.name for call in algorithm(config.type).calls(config)]
    engine, metrics = trained(config, samples, 2)
    expected = expected_loss(config, samples, range(6))
    ((_, loss, gradients),) = engine.taken
    assert loss == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    wanted = torch.autograd.grad(expected, [sample.new for sample in samples])
    for number, gradient in enumerate(wanted):
        torch.testing.assert_close(gradients[number], gradient, rtol=1e-9, atol=1e-12)
    assert metrics["policy/ratio"] == 1
    assert metrics["importance/mean"] != pytest.approx(1, abs=1e-5)


def test_a_gradient_is_what_a_small_change_of_a_log_probability_gives():
    """Central differences, away from the kinks of the clipping."""
    for variant in VARIANTS[:-2]:
        config = config_of(variant, 8, variant.get("num_generations", 2))
        samples = drawn(3, [2, 3, 4, 5, 3, 2, 4, 1], [1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.5, 0.0])
        engine, _ = trained(config, samples, 2)
        (_, _, gradients) = min(engine.taken, key=lambda step: min(step[0]))
        losses = []
        for shift in (1e-6, -1e-6):
            moved = drawn(3, [2, 3, 4, 5, 3, 2, 4, 1], [1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.5, 0.0])
            with torch.no_grad():
                moved[1].new[1] += shift
            steps = trained(config, moved, 2)[0].taken
            losses.append(min(steps, key=lambda step: min(step[0]))[1])
        slope = (losses[0] - losses[1]) / 2e-6
        if variant["type"] == "cispo":
            continue  # no gradient flows through its ratio, but the loss changes with it
        assert gradients[1][1].item() == pytest.approx(slope, rel=1e-5, abs=1e-8), variant


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_metrics_say_how_old_the_samples_are_and_what_their_tokens_weigh(mini_batches):
    samples = drawn(5, [2, 4, 6, 3], [1.0, 0.0, 0.0, 1.0])
    for sample in samples:
        sample.proximal = sample.new.detach()
    stale = {
        "staleness": 1,
        "total_iterations": 2,
        "correction": {"upper": 1.2},
        "num_mini_batches": mini_batches,
    }
    config = config_of({"type": "grpo", **stale}, 4, 2)
    _, metrics = trained(config, samples, 1)
    whole = torch.cat([(s.proximal - s.old).exp() for s in samples])
    weights = whole.clamp(max=1.2)
    assert 0 < (whole > 1.2).sum() < len(whole)
    assert {name: metrics[name] for name in metrics if name.startswith(("staleness", "importance"))} == {
        "staleness/mean": 1.0,
        "staleness/max": 1.0,
        "importance/mean": pytest.approx(weights.mean().item()),
        "importance/cut_ratio": pytest.approx((whole > 1.2).double().mean().item()),
        "importance/effective": pytest.approx((weights.sum() ** 2 / len(whole) / (weights**2).sum()).item()),
        "importance/kl": pytest.approx((whole - 1 - whole.log()).mean().item()),
    }


@pytest.mark.parametrize("correction", [{"upper": 1.2}, {"kind": "none"}])
def test_mismatch_compares_the_tokens_that_the_actor_as_it_is_has_drawn(correction):
    samples = drawn(5, [2, 4, 6, 3], [1.0, 0.0, 0.0, 1.0])
    one = {"staleness": 1, "total_iterations": 2, "correction": correction, "num_mini_batches": 1}
    config = config_of({"type": "grpo", **one}, 4, 2)
    assert "policy/mismatch" not in trained(config, samples, 2)[1], "older versions have drawn all tokens"
    for sample in samples[1:3]:
        sample.version = 3
    fresh = torch.cat([(sample.new - sample.old).detach().abs() for sample in samples[1:3]])
    _, metrics = trained(config, samples, 2)
    assert metrics["policy/mismatch"] == pytest.approx(fresh.mean().item())


def test_metrics_say_how_much_there_was_to_learn():
    scores = [1.0, 1.0, 0.0, 1.0, 0.5, 0.5, 0.0, 0.0]
    samples = drawn(1, [2, 3, 1, 4, 2, 6, 3, 3], scores)
    _, metrics = trained(config_of({"type": "grpo", "beta": 0.1}, 8, 2), samples, 1)
    assert metrics["frac_reward_zero_std"] == 0.75
    d = [sample.old - sample.ref for sample in samples]
    assert metrics["kl"] == pytest.approx(sum(((-x).exp() - 1 + x).sum().item() for x in d) / 8)
    ratios = torch.cat([(s.new - s.old).exp() for s in samples])
    assert metrics["policy/ratio"] == pytest.approx(ratios.mean().item())
    assert metrics["policy/mismatch"] > 0
    _, metrics = trained(config_of({"type": "rloo", "num_generations": 2}, 8, 2), samples, 1)
    assert metrics["kl"] == pytest.approx(sum(x.sum().item() for x in d) / 8)
    _, metrics = trained(config_of({"type": "expert_iteration", "min_score": 0.5}, 8, 2), samples, 1)
    assert metrics["learned/fraction"] == 5 / 8
    _, metrics = trained(config_of({"type": "remax", "beta": 0.0}, 8, 2), samples, 1)
    assert not {"kl", "frac_reward_zero_std"} & metrics.keys()


@pytest.mark.parametrize(
    ("variant", "scores", "greedy", "equal"),
    [
        ({"type": "rloo"}, [0.0, 0.0, 1.0, 1.0], [0.0] * 4, 1.0),
        ({"type": "rloo"}, [0.0, 1.0, 1.0, 1.0], [0.0] * 4, 0.0),
        ({"type": "reinforce_pp", "baseline": "group"}, [0.0, 0.0, 1.0, 1.0], [0.0] * 4, 1.0),
        ({"type": "reinforce_pp"}, [0.0, 0.0, 1.0, 1.0], [0.0] * 4, 0.0),
        ({"type": "reinforce_pp"}, [1.0] * 4, [0.0] * 4, 1.0),
        ({"type": "remax"}, [1.0] * 4, [1.0, 0.0, 1.0, 1.0], 0.0),
        ({"type": "remax"}, [0.0, 1.0, 1.0, 0.5], [0.0, 1.0, 1.0, 0.5], 1.0),
    ],
)
def test_rewards_are_equal_by_what_the_algorithm_compares_them_with(variant, scores, greedy, equal):
    samples = drawn(1, [2, 3, 1, 4], scores)
    for sample, score in zip(samples, greedy, strict=True):
        sample.greedy_score = score
    config = config_of({**variant, "equal_rewards_iterations": 1, "on_anomaly": "warn"}, 4, 2)
    _, metrics = trained(config, samples, 1)
    assert metrics["anomaly/equal_rewards"] == equal


def test_expert_iteration_without_a_good_response_leaves_the_model_alone():
    samples = drawn(1, [2] * 8, [0.0] * 8)
    for _ in range(4):  # and it is no fault, however often it happens
        engine, metrics = trained(config_of({"type": "expert_iteration", "min_score": 0.5}, 8, 2), samples, 1)
        assert engine.taken == []
        assert math.isnan(metrics["loss/expert_iteration"])
        assert metrics["skipped_steps/actor"] == 0
