"""What is checked and decided before anything starts: data, models, plan. Loads no torch."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flows.find_rewards import check_rewards
from planner.graph import DataflowGraph
from planner.heuristic import Limits, heuristic
from planner.mesh import Cluster
from planner.plan import build_plan
from rlhf_tasks.algorithms.graphs import GRAPHS
from rlhf_tasks.config import AnyConfig, ConfigError, PPOConfig, RolloutConfig, manual_assignments
from rlhf_tasks.examples import load_and_check
from rlhf_tasks.parallel.shape import ModelShape
from rlhf_tasks.spec import ExecutionPlan


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that was found fit, with its plan.

    data_digest  of the rows' content; a resumed run must find the same
    n_rows       rows of the data set
    """

    config: AnyConfig
    plan: ExecutionPlan
    iterations: int
    data_digest: str
    n_rows: int


def prepare(config: AnyConfig) -> Prepared:
    """Check everything that can be checked before a process starts, and make the plan.

    Raises ConfigError with one sentence that says what to change, whichever part found the fault.
    """
    try:
        return _prepare(config)
    except ConfigError:
        raise
    except (
        ValueError
    ) as error:  # what models, tokenizer, data, graph, meshes and plan raise for a user's fault
        raise ConfigError(str(error)) from error


def _prepare(config: AnyConfig) -> Prepared:
    if isinstance(config, PPOConfig | RolloutConfig):
        check_rewards(config.rewards)
    shapes = {role: _shape(role, parts.folder) for role, parts in config.roles().items()}
    rows, tokenizer = load_and_check(config)
    vocabulary = min(shape.vocab for shape in shapes.values())
    if tokenizer.size > vocabulary:
        raise ConfigError(
            f"the tokenizer of models.actor has {tokenizer.size} tokens, a model has embeddings for {vocabulary}. "
            "All models of a run must share the actor's tokenizer."
        )
    return Prepared(
        config=config,
        plan=make_plan(config, shapes),
        iterations=iterations_of(config, len(rows)),
        data_digest=rows.digest,
        n_rows=len(rows),
    )


def make_plan(config: AnyConfig, shapes: dict[str, ModelShape]) -> ExecutionPlan:
    """The execution plan of a configuration: by hand where it names assignments, else by the heuristic."""
    graph = graph_of(config, shapes)
    cluster = Cluster(config.cluster.n_hosts, config.cluster.devices_per_host)
    assignments = manual_assignments(config)
    if assignments is None:
        limits = {
            role: Limits(max_tp=shape.query_heads, max_pp=shape.layers) for role, shape in shapes.items()
        }
        assignments = heuristic(graph, cluster, limits)
    return build_plan(graph, assignments, cluster)


def graph_of(config: AnyConfig, shapes: dict[str, ModelShape]) -> DataflowGraph:
    """The dataflow graph that a configuration describes."""
    registered = GRAPHS[config.type]
    return DataflowGraph(
        registered.calls(config), registered.dataset_keys, name=config.type, architectures=shapes
    )


def iterations_of(config: AnyConfig, n_rows: int) -> int:
    """Iterations of a run: as configured; a rollout passes once over its rows."""
    if config.type == "rollout":
        per_iteration = config.batch_size // config.num_generations
        return -(-n_rows // per_iteration)
    return config.total_iterations


@cache
def _shape(role: str, folder: str) -> ModelShape:
    if not Path(folder).is_dir():
        raise ConfigError(
            f"the folder of role {role!r}, {folder}, is not there. Name a Hugging Face model folder."
        )
    return ModelShape.from_folder(folder)
