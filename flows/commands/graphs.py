"""`prefect-rlhf graph`: dataflow graphs of the registered algorithms."""

from typing import Annotated, Literal

from cyclopts import Parameter

from planner.report.text import algorithm_graph, dataflow_mermaid, dataflow_table
from rlhf_tasks.algorithms.configurations import ConfigError
from rlhf_tasks.algorithms.graphs import GRAPHS


def graph(
    algorithm: str, /, *, form: Annotated[Literal["table", "mermaid"], Parameter("--as")] = "table"
) -> None:
    """Draw an algorithm's dataflow graph.

    Parameters
    ----------
    algorithm
        A registered algorithm: ppo, grpo, sft, reward_model, rollout.
    form
        A table for the terminal, or Mermaid for documents.
    """
    name = algorithm.replace("-", "_")
    if name not in GRAPHS:
        raise ConfigError(f"there is no algorithm {algorithm!r}; registered are {', '.join(GRAPHS)}.")
    drawn = algorithm_graph(name)
    print(dataflow_table(drawn) if form == "table" else dataflow_mermaid(drawn))
