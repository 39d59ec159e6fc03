"""`prefect-rlhf doctor`: whether a model computes here, split in several ways, what plain transformers computes."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.markup import escape

from flows.run.examination import Patient, default_strategies, examined, keep_verdict, strategy_of
from flows.view.terminal import Console

console = Console(highlight=False, soft_wrap=True)


def doctor(
    *,
    model: Path,
    strategy: Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")] = None,
    dtype: Literal["float32", "bfloat16", "float64"] = "float32",
) -> None:
    """Compare a model, split over ranks on this machine, with plain transformers.

    Under each strategy: logits, gradients, greedy tokens, and a reallocation to one rank and back; a line each with
    the largest difference and the tolerance. Exit status 1 when one is out of tolerance. Takes as many rank processes
    as the largest strategy, and memory for three to four times the weights (docs/models.md). A model of a family that
    is not a tested one can be trained after it has passed: the verdict stays in its folder.

    Parameters
    ----------
    model
        A Hugging Face model folder.
    strategy
        dp,tp,pp, such as 1,2,1; several may follow. Default: one rank, and two under dp, tp and pp each.
    dtype
        Of weights and activations.
    """
    patient = Patient.of(model, dtype)
    strategies = [strategy_of(text) for text in strategy or ()] or default_strategies(patient)
    patient.check(strategies)
    console.print(f"{escape(str(model))}: {patient.described}")
    with console.status("comparing ..."):
        findings = examined(patient, strategies)
    for found in findings:
        verdict = "ok" if found.passed else "[bold red]out of tolerance[/]"
        console.print(
            f"{found.strategy!s:<16} {found.check:<14} {found.difference:9.2e} of {found.tolerance:<7.0e} {verdict}"
        )
    if told := keep_verdict(patient, strategies, findings):
        console.print(escape(told))
    if not all(found.passed for found in findings):
        raise SystemExit(1)
