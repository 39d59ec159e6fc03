"""`prefect-rlhf graph`: dataflow graphs of the registered algorithms."""

from typing import Annotated, Literal

from cyclopts import Parameter

from planner.render import algorithm_graph, dataflow_mermaid, dataflow_table


def graph(
    algorithm: str, /, *, form: Annotated[Literal["table", "mermaid"], Parameter("--as")] = "table"
) -> None:
    """Draw an algorithm's dataflow graph.

    Parameters
    ----------
    algorithm
        A registered algorithm: ppo, sft, reward_model, rollout.
    form
        A table for the terminal, or Mermaid for documents.
    """
    drawn = algorithm_graph(algorithm)
    print(dataflow_table(drawn) if form == "table" else dataflow_mermaid(drawn))
