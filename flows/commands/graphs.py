"""`prefect-rlhf graph`: dataflow graphs of the registered algorithms."""

from typing import Annotated, Literal

from cyclopts import Parameter

from planner.report.text import algorithm_graph, dataflow_mermaid, dataflow_table


def graph(
    algorithm: str, /, *, form: Annotated[Literal["table", "mermaid"], Parameter("--as")] = "table"
) -> None:
    """Draw an algorithm's dataflow graph.

    Parameters
    ----------
    algorithm
        ppo, grpo, dpo, sft, reward_model, rollout, or another algorithm (docs/algorithms.md).
    form
        `table` for the terminal, `mermaid` for documents.
    """
    drawn = algorithm_graph(algorithm.replace("-", "_"))
    print(dataflow_table(drawn) if form == "table" else dataflow_mermaid(drawn))
