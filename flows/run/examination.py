"""The examination of a model's folder (rlhf_tasks/doctor): folder, ranks and memory are checked, then ranks compare.

The verdict on an untested family is stored in the folder, and runs read it.
"""

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from prefect_rlhf.flows.cluster.this_machine import memory_bytes
from prefect_rlhf.flows.run.planning import ITEMSIZES
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.parallel.layout.families import FAMILIES
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import (
    VERDICT,
    base_of,
    check_weights,
    config_digest,
    read_shape,
)
from prefect_rlhf.rlhf_tasks.system.reading import read_json, shown

if TYPE_CHECKING:
    from prefect_rlhf.rlhf_tasks.doctor import Finding

LENGTHS = (5, 13, 1, 8)  # tokens of the sequences, which are of random tokens
NEW_TOKENS = 12
TIMEOUT_S = 3600.0
MOST_RANKS = 64
PROCESS_BYTES = 500 * 2**20  # of a process with torch and transformers, without tensors


@dataclass(frozen=True, slots=True)
class Patient:
    """A valid model folder, and the dtype to compute in."""

    folder: Path
    shape: ModelShape
    dtype: str

    @staticmethod
    def of(folder: Path, dtype: str) -> "Patient":
        """Raises ConfigError for a folder without a model, a family that cannot be split, and faulty weights."""
        shape = read_shape(folder)
        check_weights(folder, parameters(shape, "lm"), needs_head=False)
        return Patient(folder, shape, dtype)

    @property
    def weights_bytes(self) -> int:
        return sum(spec.size for spec in parameters(self.shape, "lm")) * ITEMSIZES[self.dtype]

    @property
    def described(self) -> str:
        size = self.weights_bytes // ITEMSIZES[self.dtype]
        return f"{self.shape.family}, {size / 1e6:.4g} million parameters, {self.dtype}"

    def check(self, strategies: Sequence[ParallelStrategy]) -> None:
        """Raises ConfigError for a strategy that cannot be laid out, and for more memory than there is."""
        for strategy in strategies:
            try:
                if strategy.size > MOST_RANKS:
                    raise ValueError(
                        f"it needs {strategy.size} ranks on this machine; at most {MOST_RANKS} are started."
                    )
                Layout(self.shape, "lm", Placement(tuple(range(strategy.size)), strategy))
            except ValueError as error:
                raise ConfigError(f"--strategy {strategy} cannot be laid out: {error}") from None
        largest = max(strategy.size for strategy in strategies)
        # Weights and gradients of every replica; or, while they move, once more on one rank and in the first place.
        copies = max(max(2 * s.dp, s.dp + 2) for s in strategies)
        if self.dtype == "bfloat16":
            copies = max(copies, 4)  # transformers' weights and gradients are float32
        needed = copies * self.weights_bytes + (largest + 1) * PROCESS_BYTES
        there = min(memory_bytes(), psutil.virtual_memory().available)
        if needed > there:
            raise ConfigError(
                f"the comparison needs {needed / 2**30:.1f} GiB of memory ({copies} times the weights, and {largest} "
                f"rank processes), and {there / 2**30:.1f} GiB are free. Name smaller strategies or --dtype "
                "bfloat16, or examine a smaller model of the same family."
            )


def strategy_of(text: str) -> ParallelStrategy:
    """The strategy in a text such as `1,2,1` or `1,1,1,2`. Raises ConfigError for another text."""
    try:
        dp, tp, pp, *cp = (int(part) for part in text.split(","))
        (cp,) = cp or (1,)
        return ParallelStrategy(dp, tp, pp, cp)
    except ValueError:
        raise ConfigError(
            f"--strategy {shown(text)} is not dp,tp,pp or dp,tp,pp,cp: whole numbers from 1, such as 1,2,1."
        ) from None


def default_strategies(patient: Patient) -> list[ParallelStrategy]:
    """One rank, and two under each axis that the model can be split along."""
    strategies = [ParallelStrategy(), ParallelStrategy(dp=2)]
    for split in (ParallelStrategy(tp=2), ParallelStrategy(pp=2)):
        try:
            Layout(patient.shape, "lm", Placement((0, 1), split))
        except ValueError:
            continue
        strategies.append(split)
    return strategies


def examined(patient: Patient, strategies: Sequence[ParallelStrategy]) -> "list[Finding]":
    """What ranks of this machine find. Raises ConfigError for a model that transformers or the engine refuses."""
    import torch  # takes seconds, so a faulty command is refused before
    from transformers.utils.logging import disable_progress_bar

    from prefect_rlhf.rlhf_tasks.doctor import Case, examine, run_ranks, worst, write_answers
    from prefect_rlhf.rlhf_tasks.parallel.model.stage import check_model
    from prefect_rlhf.rlhf_tasks.parallel.model.weights import load_config

    try:
        check_model(load_config(patient.folder))
    except ValueError as error:
        raise ConfigError(f"Model {str(patient.folder)!r}: {error}") from None
    disable_progress_bar()
    draw, shape = random.Random(0), patient.shape
    new_tokens = min(NEW_TOKENS, max(1, shape.context // 2))
    longest = max(1, shape.context - new_tokens)
    lengths = LENGTHS * max(strategy.dp for strategy in strategies)
    sequences = tuple(
        tuple(draw.randrange(shape.vocab) for _ in range(min(length, longest))) for length in lengths
    )
    with tempfile.TemporaryDirectory(prefix="prefect-rlhf-doctor-") as answers:
        case = Case(str(patient.folder), answers, patient.dtype, sequences, new_tokens)
        tolerances = write_answers(case, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        n = max(strategy.size for strategy in strategies)
        try:
            return worst(run_ranks(n, examine, (case, tolerances, tuple(strategies)), TIMEOUT_S))
        except RuntimeError as error:
            if shape.family in FAMILIES:
                raise
            cause = str(error).strip().rpartition("\n")[2]
            raise ConfigError(
                f"Model {str(patient.folder)!r}: layers of the family {shape.family!r} cannot be computed in parts "
                f"({cause}). Use one of another family."
            ) from error


def keep_verdict(
    patient: Patient, strategies: Sequence[ParallelStrategy], findings: "Sequence[Finding]"
) -> str:
    """Keep in the model's folder that an untested family has passed, or that it has not. Returns a sentence.

    A verdict needs each axis along which the model can be split, and at least 32 bits. Raises ConfigError where the
    folder cannot be written.
    """
    if patient.shape.family in FAMILIES:
        return ""
    file, wanted = base_of(patient.folder) / VERDICT, default_strategies(patient)
    axes = [axis for axis in ("dp", "tp", "pp") if any(getattr(s, axis) > 1 for s in wanted)]
    missing = [axis for axis in axes if all(getattr(s, axis) == 1 for s in strategies)]
    if missing or patient.dtype == "bfloat16":
        why = "bfloat16 rounds too much" if not missing else f"no strategy has {missing[0]} above 1"
        return f"{patient.shape.family} is an untested family, and runs do not accept this verdict: {why}."
    verdict = {**_subject(patient.folder), "dtype": patient.dtype, "strategies": [str(s) for s in strategies]}
    try:
        if all(finding.passed for finding in findings):
            file.write_text(json.dumps(verdict, indent=2) + "\n", encoding="utf-8")
            return f"{patient.shape.family} is an untested family; {file} allows runs of this model."
        file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written ({error.strerror}). Copy the model to a folder of yours."
        ) from None
    return f"{patient.shape.family} is an untested family, and this model cannot be trained."


def refuse_unexamined(folder: str | Path, shape: ModelShape) -> None:
    """Raises ConfigError for a model of an untested family that the doctor has not passed in this form."""
    if shape.family in FAMILIES:
        return
    file = base_of(folder) / VERDICT
    verdict = read_json(file) if file.is_file() else {}
    subject = _subject(Path(folder))
    if {key: verdict.get(key) for key in subject} != subject:
        state = "is of another config.json or version of transformers" if verdict else "is not there"
        raise ConfigError(
            f"Model {str(folder)!r} is of the untested family {shape.family!r}, and the doctor's "
            f"verdict ({VERDICT}) {state}. Run prefect-rlhf doctor --model {folder}, which compares it with plain "
            "transformers."
        )


def _subject(folder: Path) -> dict[str, str]:
    """What a verdict is about."""
    return {"config": config_digest(folder), "transformers": version("transformers")}
