"""The evaluation in a run: the same metrics on any layout, and from weights and iteration alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.algorithms.evaluation import Evaluation
from prefect_rlhf.rlhf_tasks.algorithms.examples import prepared_rows
from prefect_rlhf.rlhf_tasks.algorithms.held_out import evaluation_of, held_out_sets
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import load, load_config
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import OptimizerSettings
from prefect_rlhf.rlhf_tasks.user_code.rewards import RewardProcess
from tests.tiny_runs import ppo_config, write_prompts

ROWS, TOKENS = 5, 6
STRATEGIES = [(1, 1, 2), (2, 2, 1), (4, 1, 1)]
SIMPLER = [(2, 1, 1), (1, 2, 1)]
"""Splits that (2, 2, 1) has both of: for the slow suite."""

REWARDS = """
def total(completions, completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]

def even(completions, answer, **columns):
    return [None if int(right) % 2 else 0.5 for right in answer]

def picky(completions, **columns):
    raise AssertionError("it is used in training only")

def strict(completions, answer, **columns):
    return [1 / (int(right) % 2) for right in answer]
"""


def held_out(path: Path) -> Path:
    """Prompts of different lengths, an answer for the rewards, and a completion for the loss."""
    rows = [json.loads(line) for line in write_prompts(path, ROWS).read_text().splitlines()]
    path.write_text(
        "".join(json.dumps({**row, "completion": "xy" * (1 + i)}) + "\n" for i, row in enumerate(rows))
    )
    return path


def config_of(folder: Path, judges: Sequence[str] = ("total", "even"), **evaluation: Any):
    """PPO with an evaluation on five rows, in batches of three: some dp rank of four is always without one."""
    (folder / "judge.py").write_text(REWARDS)
    rewards: list[dict[str, Any]] = [
        {"function": f"{folder / 'judge.py'}:{name}", "used_in": "evaluation"} for name in judges
    ]
    rewards.append({"function": f"{folder / 'judge.py'}:picky", "used_in": "training"})
    asked = {
        "data": str(held_out(folder / "held_out.jsonl")),
        "max_completion_length": TOKENS,
        **evaluation,
    }
    config = ppo_config(
        folder, dtype="float64", evaluation=asked, rewards=rewards, batch_size=3, num_mini_batches=1
    )
    for name, reader in held_out_sets(config).items():
        prepared_rows(reader).keep(folder, name)
    return config


def evaluated(rank: int, world: int, strategy: tuple[int, int, int], document: str, iteration: int):
    """The metrics of one evaluation under a strategy, as this rank has them."""
    torch.set_num_threads(1)
    run = make_config(json.loads(document))
    answers = evaluation_of(run)
    assert answers is not None
    placement = Placement(tuple(range(world)), ParallelStrategy(*strategy))
    folder = run.models.actor
    layout = Layout(read_shape(folder), "lm", placement)
    groups = ProcessGroups(device_sets(placement), 240.0, torch.device("cpu"))
    stage = Stage(
        load_config(folder),
        layout,
        placement.coordinate(rank),
        groups[placement.tp_group(rank)],
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    load(stage, folder, 0)
    engine = Engine(
        stage, layout, groups, OptimizerSettings((0.9, 0.95), eps=1e-8, weight_decay=0.0, max_grad_norm=0.5)
    )
    rewards = RewardProcess(answers)
    try:
        evaluation = Evaluation(run, Path(folder).parent, rewards, Tokenizer.from_folder(folder))
        return evaluation.metrics(engine, iteration)
    finally:
        rewards.close()


@pytest.mark.dist
@pytest.mark.parametrize(
    "sampling",
    [{"loss": True}, {"temperature": 0.9, "num_generations": 2}],
    ids=["greedy and loss", "sampled"],
)
@pytest.mark.parametrize(
    "strategies", [STRATEGIES, pytest.param(SIMPLER, marks=pytest.mark.slow)], ids=["covering", "simpler"]
)
@pytest.mark.whole
def test_the_metrics_are_equal_under_every_layout(ranks: Any, tmp_path, sampling, strategies):
    """Of four dp ranks some have rows that one of the rewards does not judge, and some have none."""
    document = config_of(tmp_path, **sampling).model_dump_json()
    (alone,) = ranks.run(1, evaluated, (1, 1, 1), document, 0)
    names = {"eval/reward", "eval/total/mean", "eval/even/mean", "eval/mean_length", "eval/clipped_ratio"}
    assert set(alone) == names | ({"eval/loss"} if "loss" in sampling else set())
    for strategy in strategies:
        for metrics in ranks.run(ParallelStrategy(*strategy).size, evaluated, strategy, document, 0):
            assert metrics == pytest.approx(alone, rel=1e-9), strategy


@pytest.mark.dist
@pytest.mark.whole
def test_a_rank_whose_answers_no_reward_judges_is_no_error(ranks: Any, tmp_path):
    document = config_of(tmp_path, judges=["even"]).model_dump_json()
    alone, *split = (
        metrics
        for strategy in ((1, 1, 1), (4, 1, 1))
        for metrics in ranks.run(ParallelStrategy(*strategy).size, evaluated, strategy, document, 0)
    )
    assert alone["eval/even/mean"] == 0.5
    assert split == [pytest.approx(alone, rel=1e-9)] * 4


@pytest.mark.dist
def test_an_answer_that_a_reward_fails_on_counts_as_zero_and_is_named(ranks: Any, tmp_path):
    skips = config_of(tmp_path, judges=["strict"]).model_copy(update={"on_reward_error": "skip"})
    even = [n for n in range(ROWS) if int(answer_of(tmp_path, n)) % 2 == 0]
    assert 0 < len(even) < ROWS
    for strategy in ((1, 1, 1), (4, 1, 1), (1, 2, 1)):
        size = ParallelStrategy(*strategy).size
        for metrics in ranks.run(size, evaluated, strategy, skips.model_dump_json(), 2):
            assert metrics["eval/reward"] == pytest.approx(1 - len(even) / ROWS)
            assert metrics["eval/strict/mean"] == 1.0
            assert metrics["eval/skipped_samples"] == len(even)
        files = sorted((tmp_path / "skipped-samples").glob("evaluation-00000002-*.jsonl"))
        listed = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        assert sorted(line["sample"] for line in listed) == even, strategy
        assert all("held_out.jsonl:" in line["row"] for line in listed)


def answer_of(folder: Path, n: int) -> str:
    return json.loads((folder / "held_out.jsonl").read_text().splitlines()[n])["answer"]


@pytest.mark.dist
def test_greedy_answers_are_the_models_likeliest_tokens_and_each_row_counts_once(ranks: Any, tmp_path):
    config = config_of(tmp_path)
    (metrics,) = ranks.run(1, evaluated, (1, 1, 1), config.model_dump_json(), 3)
    tokenizer = Tokenizer.from_folder(config.models.actor)
    model = AutoModelForCausalLM.from_pretrained(config.models.actor, dtype=torch.float64)
    lengths, totals, ended, judged = [], [], 0, []
    for line in (tmp_path / "held_out.jsonl").read_text().splitlines():
        row = json.loads(line)
        ids = tokenizer.encode(row["prompt"], special_tokens=True)
        answer: list[int] = []
        while len(answer) < TOKENS and not (answer and answer[-1] in tokenizer.stop_ids):
            with torch.no_grad():
                answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
        lengths.append(len(answer))
        totals.append(sum(answer))
        ended += answer[-1] in tokenizer.stop_ids
        judged.append(None if int(row["answer"]) % 2 else 0.5)
    said = [value for value in judged if value is not None]
    assert metrics == pytest.approx(
        {
            "eval/reward": (sum(totals) + sum(said)) / ROWS,
            "eval/total/mean": sum(totals) / ROWS,
            "eval/even/mean": 0.5,
            "eval/mean_length": sum(lengths) / ROWS,
            "eval/clipped_ratio": 1 - ended / ROWS,
        }
    )


@pytest.mark.dist
def test_the_loss_is_the_mean_over_all_tokens_of_all_completions(ranks: Any, tmp_path):
    config = config_of(tmp_path, loss=True)
    (metrics,) = ranks.run(1, evaluated, (1, 1, 1), config.model_dump_json(), 0)
    tokenizer = Tokenizer.from_folder(config.models.actor)
    model = AutoModelForCausalLM.from_pretrained(config.models.actor, dtype=torch.float64)
    total, tokens = 0.0, 0
    for line in (tmp_path / "held_out.jsonl").read_text().splitlines():
        row = json.loads(line)
        given = tokenizer.encode(row["prompt"], special_tokens=True)
        learned = [*tokenizer.encode(row["completion"]), tokenizer.eos_id]
        with torch.no_grad():
            logits = model(torch.tensor([given + learned])).logits[0, len(given) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(learned), reduction="sum"))
        tokens += len(learned)
    assert metrics["eval/loss"] == pytest.approx(total / tokens, rel=1e-7)  # transformers norms in float32


@pytest.mark.dist
@pytest.mark.whole
def test_sampled_answers_depend_on_the_iteration_alone_and_greedy_ones_do_not(ranks: Any, tmp_path):
    sampled = config_of(tmp_path, temperature=3.0, num_generations=8).model_dump_json()
    first, again, later = (ranks.run(1, evaluated, (1, 1, 1), sampled, t)[0] for t in (0, 0, 1))
    assert first == again
    assert first != later
    greedy = config_of(tmp_path).model_dump_json()
    assert ranks.run(1, evaluated, (1, 1, 1), greedy, 0) == ranks.run(1, evaluated, (1, 1, 1), greedy, 1)
