"""Whole iterations on one rank, from rows to weights: real engine, generator and reward process."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_rlhf.flows.demo import MODEL, write_model_folder
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.algorithms.ppo import functions
from prefect_rlhf.rlhf_tasks.algorithms.ppo.functions import Targets, learning_targets
from prefect_rlhf.rlhf_tasks.algorithms.shared.groups import last_response_tokens
from prefect_rlhf.rlhf_tasks.algorithms.shared.policy import kl_divergence
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import reward_model_part
from prefect_rlhf.rlhf_tasks.config.responses import RewardModelScore
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch, SampleStore
from prefect_rlhf.rlhf_tasks.user_code.rewards import read_samples
from tests.rlhf_tasks.algorithms import listed
from tests.rlhf_tasks.algorithms.one_rank import OneRank, world_of_one

N_SEQS = 8
REWARD = """
def letters(prompts, completions, answer, **columns):
    return [len(c) / 8 if a != "none" else None for c, a in zip(completions, answer)]
"""


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two spinning threads on a busy machine are ten times slower than one
    with world_of_one():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with weights, rows of every kind, and a reward."""
    folder = tmp_path_factory.mktemp("run")
    write_model_folder(folder / "base")
    small = {**MODEL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    (folder / "base" / "config.json").write_text(json.dumps({**small, "initializer_range": 0.2}))
    rows = [
        {"prompt": f"{'ab' * i}>", "completion": "ba", "chosen": "ba", "rejected": "ab", "answer": "ba"}
        for i in range(1, 8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    run = OneRank(make_config(document("sft", folder, "base", random_init=True)), folder)
    run.save("actor", folder / "actor")
    run.close()
    return folder


def document(kind: str, folder: Path, actor: str = "actor", **changes: Any) -> dict[str, Any]:
    common = {
        "type": kind,
        "dtype": "float32",
        "models": {"actor": str(folder / actor)},
        "data": {"train": str(folder / "rows.jsonl")},
        "batch_size": N_SEQS,
        "seed": 1,
    }
    training = {"total_iterations": 4, "num_mini_batches": 2, "optimizer": {"learning_rate": 1e-3}}
    scoring = {
        "sampling": {"max_completion_length": 8},
        "rewards": [{"function": f"{folder}/rewards.py:letters", "weight": 2.0}],
        "missing_eos_penalty": 0.5,
    }
    by_kind = {"sft": training, "reward_model": training, "rollout": scoring}
    return {**common, **by_kind.get(kind, training | scoring), **changes}


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Any]:
    runs: list[OneRank] = []

    def make(kind: str, **changes: Any) -> OneRank:
        runs.append(OneRank(make_config(document(kind, folder, **changes)), tmp_path))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def weights(run: OneRank, role: str) -> dict[str, torch.Tensor]:
    return {name: w.detach().clone() for name, w in run.engines[role].stage.named_slices().items()}


def trained(run: OneRank, store: SampleStore, n: int) -> tuple[dict[str, float], list[torch.Tensor]]:
    """The metrics of the train calls on the first n samples or places, and the weights after them."""
    metrics: dict[str, float] = {}
    for call in run.calls:
        if call.kind == "train_step":
            metrics |= run.call(call, 0, store, range(n))
    roles = [role for role, engine in run.engines.items() if engine.optimizer is not None]
    return metrics, [w for role in roles for w in weights(run, role).values()]


def changed(run: OneRank, role: str, before: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(w, before[name]) for name, w in weights(run, role).items())


def whole(store: SampleStore, *keys: str) -> Any:
    return store.get(list(range(N_SEQS)), keys)


def test_what_a_reward_gets_of_a_row_does_not_depend_on_the_rows_beside_it(start: Any, tmp_path: Path):
    """Which rows are together depends on the layout; these have different columns, as those of two sources may."""
    rows = [{"prompt": "ab>", "answer": "ba"}, {"prompt": "b>", "solution": "ab"}]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = start("rollout", data={"train": str(tmp_path / "mixed.jsonl")}, batch_size=2)
    _, store = run.iterate(0)
    call = next(call for call in run.calls if call.name == "reward_inference")

    def scores(*ids: int) -> list[float]:
        output = run.output(call, run.engines[call.role], store.get(list(ids), call.inputs), 0, range(2))
        return output.batch["scores"].values.tolist()

    assert scores(0) + scores(1) == scores(0, 1)


def test_ppo_gives_every_key_and_trains_actor_and_critic_only(start: Any):
    run = start("ppo", num_ppo_epochs=2)
    before = {role: weights(run, role) for role in run.engines}
    metrics, store = run.iterate(0)
    assert {role: changed(run, role, before[role]) for role in before} == {
        "actor": True,
        "critic": True,
        "ref": False,
    }
    expected = {
        "reward",
        "reward_std",
        "rewards/letters/mean",
        "kl",
        "entropy",
        "clip_ratio",
        "completions/mean_length",
    }
    assert expected | {"throughput/tokens_per_s", "loss/policy", "loss/value"} <= metrics.keys()
    assert metrics["policy/steps"] == 4
    assert all(engine.version == 0 for engine in run.engines.values())  # the executor's to advance
    batch = whole(store, "input_ids", "response_mask", "old_logprobs", "ref_logprobs", "values", "scores")
    outside = ~batch["response_mask"].values
    for key in ("old_logprobs", "ref_logprobs", "values"):
        assert batch[key].lengths == batch["input_ids"].lengths
        assert not batch[key].values[outside].any()
    assert batch["scores"].lengths == (1,) * N_SEQS


def test_before_the_first_step_actor_and_reference_agree(start: Any):
    metrics, store = start("ppo").iterate(0)
    assert metrics["policy/mismatch"] < 1e-5
    assert metrics["kl"] == pytest.approx(0, abs=1e-4)
    batch = whole(store, "old_logprobs", "ref_logprobs")
    torch.testing.assert_close(
        batch["old_logprobs"].values, batch["ref_logprobs"].values, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("cut", [{"top_k": 9}, {"top_p": 0.7}, {"min_new_tokens": 4}], ids=str)
def test_a_policy_sampled_in_part_is_trained_in_the_same_part(start: Any, cut: dict[str, Any]):
    """Behind top-k, top-p or where no end may be drawn yet, rollout, reference and training agree as they do
    without."""
    sampling = {"max_completion_length": 8, **cut}
    metrics, store = start("ppo", sampling=sampling, num_mini_batches=1).iterate(0)
    assert metrics["policy/mismatch"] < 1e-5
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-4)
    assert 0 < metrics["entropy"] < math.log(9 if "top_k" in cut else 257)
    counts = whole(store, "kept_counts")["kept_counts"].values
    assert counts.any()
    assert counts.abs().max() < 257


def test_truncated_responses_are_scored_as_the_option_says(start: Any):
    shaped, returned = {}, {}
    for option in ("keep", "zero", "bootstrap"):
        run = start("ppo", truncated_responses=option, kl_coef=0.0, gamma=0.5, lam=1.0)
        run.calls = [call for call in run.calls if call.name != "critic_train"]
        metrics, store = run.iterate(0)
        shaped[option], returned[option] = metrics["shaped_reward"], metrics["returns/mean"]
    batch = whole(store, "input_ids", "response_mask", "scores", "truncated", "final_values")
    scores, cut, finals = (batch[key].values.double() for key in ("scores", "truncated", "final_values"))
    assert 0 < cut.sum() < N_SEQS
    assert shaped["keep"] == shaped["bootstrap"] == pytest.approx(scores.mean().item())
    assert shaped["zero"] == pytest.approx((scores * (1 - cut)).mean().item())
    values = run.engines["critic"].inference(batch, lambda y, micro: y, 1)
    last = torch.stack([part[-1] for part in values.split()]).double()
    torch.testing.assert_close(finals, last, rtol=1e-6, atol=1e-6)  # float32, of other micro-batches
    # With lambda 1, values cancel: a return is the discounted end, at every token of the response.
    lengths = torch.stack([mask.sum() for mask in batch["response_mask"].split()])
    discounts = torch.stack([(0.5 ** torch.arange(int(n)).double()).sum() for n in lengths])
    tokens = lengths.sum()
    assert returned["keep"] == pytest.approx(float((scores * discounts).sum() / tokens), rel=1e-5)
    ends = scores + 0.5 * cut * finals
    assert returned["bootstrap"] == pytest.approx(float((ends * discounts).sum() / tokens), rel=1e-5)


def test_scores_are_the_weighted_sum_less_the_penalty_for_a_missing_end(start: Any):
    _, store = start("ppo").iterate(0)
    batch = whole(store, "input_ids", "response_mask", "truncated", "scores")
    run = start("ppo")
    for ids, mask, truncated, score in zip(*(batch[key].split() for key in batch.data), strict=True):
        text = run.tokenizer.decode(ids[mask].tolist())
        assert score.item() == pytest.approx(2.0 * len(text) / 8 - 0.5 * truncated.item())


def test_the_reward_models_score_is_normalised_clipped_and_weighted(start: Any, folder: Path):
    settings = {"weight": 0.3, "mean": 0.1, "std": 0.5, "clip": 1.0}
    models = {"actor": str(folder / "actor"), "reward": str(folder / "actor")}
    run = start("ppo", models=models, reward_model=settings, rewards=[], missing_eos_penalty=0.0)
    metrics, store = run.iterate(0)
    batch = whole(store, "input_ids", "scores")
    values = run.engines["reward"].inference(batch, lambda y, micro: y, 1)
    raw = torch.stack([part[-1] for part in values.split()]).double()
    expected = 0.3 * ((raw - 0.1) / 0.5).clamp(-1, 1)
    torch.testing.assert_close(batch["scores"].values.double(), expected)
    assert metrics["rewards/reward_model/mean"] == pytest.approx(raw.mean().item())
    assert metrics["reward_std"] == pytest.approx(expected.std().item(), rel=1e-5)


def test_a_score_without_clipping_is_only_shifted_and_scaled():
    raw = torch.tensor([1.0, 100.0])
    assert reward_model_part(raw, RewardModelScore(weight=2, mean=1, std=2)).tolist() == [0.0, 99.0]


def test_a_reward_without_an_opinion_counts_neither_in_score_nor_in_mean(start: Any, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "ab>", "answer": "none"}\n{"prompt": "ba>", "answer": "ab"}\n')
    metrics, store = start("ppo", data={"train": str(rows)}, missing_eos_penalty=0.0).iterate(0)
    scores = whole(store, "scores")["scores"].values
    assert (scores == 0).sum() >= N_SEQS / 2
    assert metrics["rewards/letters/mean"] == pytest.approx(scores.sum().item() / 2.0 / (N_SEQS / 2))


def test_the_same_seed_repeats_an_iteration_bit_by_bit_and_another_does_not(start: Any):
    def trace(seed: int) -> tuple:
        run = start("ppo", seed=seed)
        metrics, store = run.iterate(0)
        metrics.pop("throughput/tokens_per_s")
        return metrics, whole(store, "input_ids")["input_ids"].values.tolist()

    first = trace(1)
    assert trace(1) == first
    assert trace(2) != first


def test_the_actor_waits_for_the_critics_warm_up(start: Any):
    run = start("ppo", critic_warmup_iterations=1, kl_target=1.0)
    actor, critic = weights(run, "actor"), weights(run, "critic")
    metrics, _ = run.iterate(0)
    assert not changed(run, "actor", actor)
    assert changed(run, "critic", critic)
    assert metrics["policy/steps"] == 0
    assert run.engines["actor"].state["kl_coef"] == run.engines["critic"].state["kl_coef"] < 0.05
    run.iterate(1)
    assert changed(run, "actor", actor)


def test_a_ratio_out_of_bounds_ends_the_actors_steps_and_not_the_critics(start: Any):
    optimizer = {"learning_rate": 0.05, "max_grad_norm": 100.0}
    metrics, _ = start("ppo", num_ppo_epochs=8, early_stop_ratio=1.0001, optimizer=optimizer).iterate(0)
    assert 1 <= metrics["policy/steps"] < 16
    metrics, _ = start("ppo", num_ppo_epochs=8, optimizer=optimizer).iterate(0)
    assert metrics["policy/steps"] == 16


def test_the_adaptive_coefficient_follows_the_measured_kl(start: Any, folder: Path):
    run = start("ppo", kl_target=1e-6, kl_horizon=80, kl_coef=0.1, optimizer={"learning_rate": 0.01})
    run.iterate(0)  # the policy is still the reference: below the target, or above by rounding
    start_coef = run.engines["actor"].state["kl_coef"]
    assert start_coef == pytest.approx(0.1, rel=0.021)
    metrics, store = run.iterate(1)
    batch = store.get(list(range(N_SEQS, 2 * N_SEQS)), ["old_logprobs", "ref_logprobs"])
    kl = kl_divergence(batch["old_logprobs"].values, batch["ref_logprobs"].values, "k1").sum() / N_SEQS
    assert metrics["kl"] == pytest.approx(kl.item(), rel=1e-5)
    assert metrics["kl_coef"] == start_coef
    step = 1.02 if kl > 0 else 0.98
    assert run.engines["actor"].state["kl_coef"] == pytest.approx(start_coef * step)
    assert run.engines["actor"].state == {"kl_coef": run.engines["critic"].state["kl_coef"]}


def test_the_targets_of_learning_are_computed_without_a_trace(start: Any, monkeypatch: pytest.MonkeyPatch):
    """Only the calls store what follows from them."""
    run, seen = start("ppo", kl_target=1e-6), []

    def twice(engine: Any, *arguments: Any) -> Targets:
        before = dict(engine.state)
        first, second = (learning_targets(engine, *arguments) for _ in range(2))
        seen.append((engine.state == before, first.metrics == second.metrics, first.state == second.state))
        return second

    monkeypatch.setattr(functions, "learning_targets", twice)
    run.iterate(0)
    assert seen == [(True, True, True)] * 2
    assert all("kl_coef" in run.engines[role].state for role in ("actor", "critic"))


def test_normalised_values_come_out_in_reward_units(start: Any):
    run = start("ppo", normalize_values=True)
    _, store = run.iterate(0)
    critic = next(call for call in run.calls if call.name == "critic_inference")
    state = run.engines["critic"].state.pop("value_norm")
    run.call(critic, 0, store, range(N_SEQS))
    raw = whole(store, "values", "response_mask")
    run.engines["critic"].state["value_norm"] = state
    run.call(critic, 0, store, range(N_SEQS))
    mean = state["mean_sum"] / state["weight"]
    std = (state["square_sum"] / state["weight"] - mean**2) ** 0.5
    expected = torch.where(raw["response_mask"].values, raw["values"].values * std + mean, 0.0)
    torch.testing.assert_close(whole(store, "values")["values"].values, expected)


def test_a_score_that_is_not_a_number_costs_an_iteration_and_no_more(start: Any):
    run = start("ppo", normalize_values=True, kl_target=1.0)
    store = run.iterate(0)[1]
    train = [call for call in run.calls if call.kind == "train_step"]
    before = {role: (weights(run, role), dict(run.engines[role].state)) for role in ("actor", "critic")}
    sound = whole(store, "scores", "ref_logprobs")
    for key, place in (("scores", 3), ("ref_logprobs", -1)):
        values = sound[key].values.clone()
        values[place] = math.nan
        store.put(SampleBatch(sound.ids, {key: Packed(values, sound[key].lengths)}))
    metrics = run.call(train[0], 1, store, range(N_SEQS)) | run.call(train[1], 1, store, range(N_SEQS))
    assert math.isnan(metrics["returns/mean"])
    assert (metrics["policy/steps"], math.isnan(metrics["loss/policy"])) == (0, True)
    for role, (weight, state) in before.items():
        assert metrics[f"skipped_steps/{role}"] == 2
        assert not changed(run, role, weight)
        assert run.engines[role].state == {**state, "skipped_calls": 1}
    metrics, _ = run.iterate(1)
    for role, (weight, _) in before.items():
        assert metrics[f"skipped_steps/{role}"] == 0
        assert changed(run, role, weight)
        assert "skipped_calls" not in run.engines[role].state
    assert all(math.isfinite(value) for value in metrics.values())


def test_sft_lowers_its_loss(start: Any):
    run = start("sft", optimizer={"learning_rate": 1e-2})
    losses = [run.iterate(i)[0]["loss/sft"] for i in range(4)]
    assert losses[-1] < 0.5 * losses[0]


def test_reward_modelling_learns_which_answer_is_chosen(start: Any):
    run = start("reward_model", optimizer={"learning_rate": 1e-2})
    metrics = [run.iterate(i)[0] for i in range(4)]
    assert metrics[0]["loss/reward_model"] > metrics[-1]["loss/reward_model"]
    assert metrics[-1]["accuracy"] == 1.0
    assert metrics[-1]["reward/margin"] > 1.0


@pytest.mark.parametrize("chunks", [1, 2])
def test_rollouts_write_each_sample_once_in_file_order(start: Any, tmp_path: Path, chunks: int):
    sampling = {"max_completion_length": 8, "temperature": 0.9}
    run = start("rollout", num_generations=2, sampling=sampling, chunks=chunks)
    for iteration in (0, 1, 0):  # an iteration that is repeated leaves the same files
        run.iterate(iteration)
    samples = list(read_samples(tmp_path, 14))
    assert [sample["id"] for sample in samples] == list(range(14))
    assert [sample["prompt"] for sample in samples] == [f"{'ab' * (i // 2 + 1)}>" for i in range(14)]
    for sample in samples:
        assert sample["columns"]["answer"] == "ba"
        assert sample["rewards"] == {"letters": len(sample["completion"]) / 8}
        penalty = 0.5 * sample["truncated"]
        assert sample["score"] == pytest.approx(2 * sample["rewards"]["letters"] - penalty)
    assert len(list(read_samples(tmp_path, 5))) == 5


GROUPED = {"num_generations": 4}
CRITIC_FREE = {
    "grpo": {**GROUPED, "beta": 0.1},
    "dr_grpo": GROUPED,
    "dapo": GROUPED,
    "gspo": GROUPED,
    "cispo": GROUPED,
    "rloo": GROUPED,
    "remax": {},
    "reinforce_pp": {},
    "expert_iteration": {**GROUPED, "best_of_group": True},
}


@pytest.mark.parametrize("kind", CRITIC_FREE)
def test_algorithms_without_a_critic_train_the_actor_alone(start: Any, kind: str):
    run = start(kind, **CRITIC_FREE[kind])
    before = {role: weights(run, role) for role in run.engines}
    metrics, store = run.iterate(0)
    with_ref = kind in ("grpo", "rloo", "remax", "reinforce_pp")
    assert run.engines.keys() == ({"actor", "ref"} if with_ref else {"actor"})
    assert changed(run, "actor", before["actor"])
    assert not with_ref or not changed(run, "ref", before["ref"])
    assert {"reward", "reward_std", "completions/mean_length", "grad_norm/actor"} <= metrics.keys()
    size = CRITIC_FREE[kind].get("num_generations", 1)
    prompts = [json.loads(text)["prompt"] for text in whole(store, "columns")["columns"].texts()]
    assert [len(set(prompts[at : at + size])) for at in range(0, N_SEQS, size)] == [1] * (N_SEQS // size)
    assert len(set(prompts)) == min(N_SEQS // size, 7)  # of seven rows
    if kind == "expert_iteration":
        assert metrics["learned/fraction"] == 1 / 4
        return
    assert metrics["policy/mismatch"] < 1e-5
    assert {"entropy", "clip_ratio", "loss/policy"} <= metrics.keys()
    assert ("kl" in metrics) == with_ref
    assert ("frac_reward_zero_std" in metrics) == (size > 1)


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_program_and_a_list_of_calls_train_to_the_same_bits(start: Any, kind: str):
    program, by_list = (start(kind, **CRITIC_FREE.get(kind, {})) for _ in range(2))
    by_list.calls = getattr(listed, kind)(by_list.config)
    for run in (program, by_list):
        before = weights(run, "actor")
        for iteration in range(2):
            run.iterate(iteration)
        assert changed(run, "actor", before)
    for role in program.engines:
        assert not changed(program, role, weights(by_list, role)), role


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [("ppo", 4), *(pytest.param(kind, 2, marks=pytest.mark.whole) for kind in ("grpo", "remax"))],
)
def test_a_batch_in_parts_has_the_same_tokens_and_metrics(start: Any, kind: str, chunks: int):
    found = []
    for parts in (1, chunks):
        metrics, store = start(kind, chunks=parts, dtype="float64", **CRITIC_FREE.get(kind, {})).iterate(0)
        found.append((metrics, whole(store, "input_ids", "scores", "truncated")))
    (metrics, batch), (of_parts, in_parts) = found
    for key, packed in batch.data.items():
        assert torch.equal(packed.values, in_parts[key].values), key
    assert of_parts.keys() == metrics.keys(), "a metric is of the whole call"
    for name, value in metrics.items():
        if "per_s" not in name:
            assert of_parts[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_a_number_of_parts_that_does_not_divide_the_groups_is_refused(start: Any):
    with pytest.raises(ConfigError, match=r"chunks=3 does not divide batch_size / num_generations = 2"):
        start("grpo", num_generations=4, chunks=3)


def test_remax_compares_with_the_likeliest_response(start: Any):
    run = start("remax", missing_eos_penalty=0.0)
    metrics, store = run.iterate(0)
    batch = whole(store, "input_ids", "greedy_input_ids", "greedy_response_mask", "greedy_scores", "scores")
    for ids, mask, score in zip(
        batch["greedy_input_ids"].split(),
        batch["greedy_response_mask"].split(),
        batch["greedy_scores"].split(),
        strict=True,
    ):
        assert score.item() == pytest.approx(2.0 * len(run.tokenizer.decode(ids[mask].tolist())) / 8)
    rolled = start("rollout", sampling={"max_completion_length": 8, "temperature": 0})
    del rolled.engines["actor"]
    rolled.engines["actor"] = start("remax").engines["actor"]  # before its training
    prompts = SampleBatch(tuple(range(N_SEQS)), {"prompt_ids": whole(store, "prompt_ids")["prompt_ids"]})
    again = SampleStore()
    again.put(prompts)
    rolled.call(next(call for call in rolled.calls if call.kind == "generate"), 0, again, range(N_SEQS))
    assert torch.equal(
        again.get(list(range(N_SEQS)), ["input_ids"])["input_ids"].values, batch["greedy_input_ids"].values
    )
    assert metrics["greedy/reward"] == pytest.approx(batch["greedy_scores"].values.mean().item(), rel=1e-6)
    assert not torch.equal(batch["input_ids"].values, batch["greedy_input_ids"].values)


def test_whitened_rewards_have_a_standard_deviation_of_one_and_keep_their_mean(start: Any):
    run, seen = start("ppo", kl_coef=0.0, lam=1.0, gamma=1.0, whiten_rewards=True), []

    def first(engine: Any, batch: SampleBatch, context: Any) -> Targets:
        if not seen:
            seen.append((batch, learning_targets(engine, batch, context)))
        return seen[0][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "learning_targets", first)
        run.calls = [call for call in run.calls if call.name != "critic_train"]
        run.iterate(0)
    batch, targets = seen[0]
    mask, lengths = batch["response_mask"].values, batch["input_ids"].lengths
    rewards = torch.zeros(len(mask)).double()
    rewards[last_response_tokens(mask, lengths)] = batch["scores"].values.double()
    rewards = rewards[mask]
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-8) + rewards.mean()
    returns = targets.returns[mask].double().split([int(part.sum()) for part in mask.split(list(lengths))])
    found = torch.cat([r - torch.cat([r[1:], r.new_zeros(1)]) for r in returns])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_greedy_rollouts_take_the_likeliest_tokens(start: Any, tmp_path: Path):
    run = start("rollout", sampling={"max_completion_length": 8, "temperature": 0})
    _, store = run.iterate(0)
    batch = whole(store, "input_ids", "response_mask")
    engine = run.engines["actor"]
    logits = engine.inference(batch, lambda y, micro: y, 1)
    for ids, mask, rows in zip(
        batch["input_ids"].split(), batch["response_mask"].split(), logits.split(), strict=True
    ):
        places = mask.nonzero().squeeze(1)
        assert ids[places].tolist() == rows[places - 1].argmax(-1).tolist()


def test_responses_end_with_an_end_token_or_are_truncated(start: Any):
    run = start("ppo")
    metrics, store = run.iterate(0)
    batch = whole(store, "input_ids", "response_mask", "truncated")
    last = last_response_tokens(batch["response_mask"].values, batch["input_ids"].lengths)
    ended = batch["input_ids"].values[last] == run.tokenizer.eos_id
    assert (ended == ~batch["truncated"].values.bool()).all()
    lengths = torch.stack([mask.sum() for mask in batch["response_mask"].split()]).double()
    assert metrics["completions/mean_length"] == pytest.approx(lengths.mean().item())
    assert metrics["completions/clipped_ratio"] == pytest.approx((~ended).double().mean().item())
