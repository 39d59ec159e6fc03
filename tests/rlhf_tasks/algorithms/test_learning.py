"""What DPO, KTO and distillation learn on one rank shows on rows that they have not seen."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config, override
from prefect_rlhf.rlhf_tasks.algorithms.examples import prepared_rows
from prefect_rlhf.rlhf_tasks.algorithms.functions import fetch
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from tests.rlhf_tasks.algorithms.one_rank import OneRank, world_of_one
from tests.tiny_runs import write_model

N_SEQS = 16


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with world_of_one():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and rows of one taste: numbers of two digits are polite answers, others are not."""
    folder = tmp_path_factory.mktemp("taste")
    write_model(folder / "actor", num_hidden_layers=2)
    write_model(folder / "teacher", num_hidden_layers=2, seed=5)
    for name, numbers in (("train", range(0, 60, 2)), ("held-out", range(1, 33, 2))):
        rows = [
            {"prompt": f"{i}>", "chosen": f"{i:02d} thanks", "rejected": f"what? {i:02d}"} for i in numbers
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Any]:
    runs: list[OneRank] = []

    def make(kind: str, **changes: Any) -> OneRank:
        document = {
            "type": kind,
            "dtype": "float32",
            "models": {"actor": str(folder / "actor"), **changes.pop("models", {})},
            "data": {"train": str(folder / "train.jsonl")},
            "batch_size": N_SEQS,
            "num_mini_batches": 2,
            "total_iterations": 20,
            "optimizer": {"learning_rate": 3e-3},
            **changes,
        }
        runs.append(OneRank(make_config(document), tmp_path))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def held_out(run: OneRank, folder: Path, n: int = N_SEQS) -> SampleBatch:
    """Samples of the held-out rows."""
    config = override(run.config, [f"data.train={folder / 'held-out.jsonl'}"])
    return fetch(prepared_rows(config), config, range(n))


def log_ratios(run: OneRank, batch: SampleBatch, key: str) -> Tensor:
    """Log-probability of each sample's answer under the actor less that under the reference."""
    actor, ref = (
        run.output(run.calls[0], run.engines[role], batch, 0, range(len(batch))).batch
        for role in ("actor", "ref")
    )
    return actor[key].values - ref[key].values


def test_the_references_log_probabilities_are_those_of_transformers(start: Any, folder: Path):
    """Of each answer of a pair, though pairs of different lengths share micro-batches in another order."""
    run = start("dpo", models={"ref": str(folder / "teacher")})
    batch, model = held_out(run, folder), LlamaForCausalLM.from_pretrained(folder / "teacher")
    found = run.output(run.calls[0], run.engines["ref"], batch, 0, range(N_SEQS)).batch
    for side in ("chosen", "rejected"):
        keys = (f"{side}_ids", f"{side}_mask", f"ref_{side}_logps")
        parts = (batch[keys[0]].split(), batch[keys[1]].split(), found[keys[2]].values)
        for ids, mask, logps in zip(*parts, strict=True):
            with torch.no_grad():
                log_probs = model(ids[None]).logits[0].log_softmax(1)
            expected = log_probs[:-1].gather(1, ids[1:, None]).squeeze(1)[mask[1:]].sum()
            assert logps.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"loss_type": "ipo", "beta": 0.5}, {"loss_type": "hinge"}, {"label_smoothing": 0.1}],
    ids=str,
)
def test_dpo_raises_the_margin_of_held_out_pairs(start: Any, folder: Path, options: dict[str, Any]):
    run = start("dpo", **options)
    batch = held_out(run, folder)

    def margins() -> Tensor:
        chosen, rejected = (log_ratios(run, batch, f"ref_{side}_logps") for side in ("chosen", "rejected"))
        return chosen - rejected

    assert margins().abs().max() == 0
    first = run.iterate(0)[0]
    for iteration in range(1, 8):
        last = run.iterate(iteration)[0]
    assert (margins() > 0).float().mean() >= 0.9
    assert last["loss/dpo"] < first["loss/dpo"]
    assert last["rewards/accuracies"] == 1.0
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"])


def test_kto_tells_held_out_answers_apart(start: Any, folder: Path):
    run = start("kto", beta=0.3)
    batch = held_out(run, folder, 32)
    first = run.iterate(0)[0]
    assert first["count/chosen"] + first["count/rejected"] == N_SEQS
    for iteration in range(1, 12):
        last = run.iterate(iteration)[0]
    ratios, desirable = log_ratios(run, batch, "ref_logps"), batch["desirable"].values
    assert ratios[desirable].mean() > ratios[~desirable].mean() + 5
    assert last["loss/kto"] < first["loss/kto"]
    assert last["kl"] >= 0
    assert last["rewards/margins"] > 1


@pytest.mark.whole
def test_distillation_brings_the_student_closer_to_its_teacher(start: Any, folder: Path):
    """Measured over the whole vocabulary, which the estimate never sees, on the student's answers to new prompts."""
    run = start(
        "distillation",
        models={"teacher": str(folder / "teacher")},
        sampling={"max_completion_length": 12},
        num_mini_batches=1,
        batch_size=64,
    )
    prompts = held_out(run, folder)

    def divergence() -> float:
        answered = run.output(run.calls[0], run.engines["actor"], prompts, 0, range(N_SEQS)).batch

        def log_probs(logits: Tensor, micro: MicroBatch) -> Tensor:
            return logits.log_softmax(1)

        student, teacher = (
            run.engines[role].inference(answered, log_probs, 1) for role in ("actor", "teacher")
        )
        per_token = (student.values.exp() * (student.values - teacher.values)).sum(1)
        return per_token[answered["response_mask"].values.roll(-1)].mean().item()

    before = divergence()
    metrics = [run.iterate(iteration)[0] for iteration in range(20)]
    assert metrics[0]["kl"] > 0
    assert divergence() < 0.7 * before
    assert metrics[-1]["loss/distillation"] < 0.8 * metrics[0]["loss/distillation"]
