"""Small random problems of the plan search, and the best of all choices where these are few enough to try all."""

import math
from contextlib import suppress
from types import SimpleNamespace

import numba
import numpy as np

from prefect_rlhf.planner.plan.build import PlanError
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Lengths, RoleModel, Workload
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.devices import DeviceLink, preset
from prefect_rlhf.planner.pricing.options import LONG_TOKENS
from prefect_rlhf.planner.pricing.problem import OptionsTakeTooLongError, Problem, ProblemError
from prefect_rlhf.planner.search.compiled.evaluator import value
from prefect_rlhf.planner.search.compiled.tables import Tables
from prefect_rlhf.planner.search.search import find_plan
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, in_parts
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import from_older_versions
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape

OTHERS = ("mcmc", "heuristic", "symmetric", "hybrid", "disjoint", "colocated")
MOST_CHOICES = 300_000  # a second or so of enumeration
ROUNDING = 1e-9  # relative
MOST_S = 60.0  # seconds that a search may have, if its options take so long


def scarce_problem(number: int) -> Problem:
    """The same problem with so little memory that weights are sharded in some options of many."""
    return with_memory(random_problem(number), (0.33e9, 0.42e9, 0.5e9)[number % 3])


def crowded_problem(number: int) -> Problem:
    """The same problem with memory for the largest option of any call alone, or for most of that: where several roles
    are large, they fit alone but not together."""
    ample = with_memory(random_problem(number), 80e9)
    most = max(max(o.held) + o.active_bytes for own in Tables(ample).options for o in own)
    return with_memory(ample, (0.4, 0.5, 0.6)[number % 3] * most)


def with_memory(whole: Problem, memory_bytes: float) -> Problem:
    """A problem on devices of so many bytes."""
    model = whole.model
    device = model.classes.profiles[0].model_copy(update={"memory_bytes": int(memory_bytes)})
    cost = CostModel(model.cluster, device, model.models, model.workload)
    return Problem(whole.graph, cost, whole.max_tp)


def random_problem(number: int, long: bool = False) -> Problem:
    """Problem `number`, the same everywhere. long: of sequences whose tokens may be divided over ranks

    GRPO or PPO, with parts, rounds and staleness, on two to four devices of one or two hosts, with fast or slow
    links, one role or several, ample and scarce memory.
    """
    draw = np.random.default_rng(number)

    def one_of(*values):
        return values[draw.integers(len(values))]

    chunks, rounds = one_of((1, 1), (2, 1), (2, 1), (4, 1), (1, 2), (1, 3))
    staleness = one_of(0, 1, 1, 2) if rounds == 1 else 0  # rounds wait for scores: they are not drawn ahead
    name = "grpo" if rounds > 1 else one_of("grpo", "grpo", "grpo", "ppo")
    mini_batches, n_seqs = one_of(1, 2), one_of(4, 8, 16)
    roles = ("actor", "critic", "ref", "reward")
    config = SimpleNamespace(
        batch_size=n_seqs,
        group_size=1,
        num_mini_batches=mini_batches,
        scoring_role=one_of("actor", "reward") if name == "grpo" else "reward",
        on_reward_error="stop",
        scores_tokens=False,
        roles=lambda: roles,
        records_kept=False,
        truncated_responses="keep",
        mask_truncated_completions=False,
        beta=one_of(0.0, 0.1),
        max_rounds=rounds,
        staleness=staleness,
        learns_from_older=staleness > 0,
        infers_proximal=staleness > 0 and mini_batches > 1,
        sampling=SimpleNamespace(segment_tokens=None),
    )
    registered = algorithm(name)
    calls = from_older_versions(registered.graph(config), config)  # pyright: ignore[reportArgumentType]
    graph = DataflowGraph(in_parts(calls, chunks), registered.dataset_keys, name=name)
    shape = ModelShape.from_config(
        {
            "model_type": "llama",
            "hidden_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 2048,
            "vocab_size": 8192,
            "max_position_embeddings": 4096,
        }
    )
    heads = {"actor": "lm", "ref": "lm", "critic": "scalar", "reward": "scalar"}
    models = {role: RoleModel(shape=shape, head=heads[role]) for role in graph.roles}  # type: ignore[arg-type]
    inside, between = one_of((300e9, 25e9), (25e9, 1.25e9), (1.25e9, 1.25e9), (1.25e9, 0.1e9), (0.1e9, 0.1e9))
    device = preset("a100-80g-sxm").model_copy(
        update={
            "inside_host": DeviceLink(bytes_per_s=inside, latency_s=5e-6),
            "between_hosts": DeviceLink(bytes_per_s=between, latency_s=15e-6),
            "dispatch_s": one_of(1e-4, 5e-3),
            "context_bytes": 0,
            "communicator_bytes": 0,
            "fragmentation": 0.0,
            "memory_bytes": int(one_of(80e9, 80e9, 1.2e9, 0.9e9)),
        }
    )
    lengths = one_of((16, 16), (128, 128), (128, 1024), (1024, 16))
    if long:
        lengths = (LONG_TOKENS, lengths[1])
    workload = Workload(
        prompt_tokens=lengths[0], new_tokens=Lengths.fixed(lengths[1]), itemsize=2, recompute="full"
    )
    cluster = one_of(Cluster(1, 2), Cluster(1, 2), Cluster(2, 1), Cluster(1, 3), Cluster(1, 4), Cluster(2, 2))
    return Problem(graph, CostModel(cluster, device, models, workload), max_tp=one_of(1, None))


def enumerated(tables: Tables) -> float:
    """The least seconds per iteration of all choices that fit; infinite where none does."""
    return _least(tables.arrays, np.array([*map(len, tables.options)]))


@numba.njit(error_model="numpy")
def _least(arrays, counts):
    choice, best = np.zeros(len(counts), np.int64), np.inf
    while True:
        time_s, excess_bytes, _ = value(arrays, choice, best)
        if excess_bytes <= 0 and time_s < best:
            best = time_s
        call = len(counts) - 1
        while call >= 0 and choice[call] == counts[call] - 1:
            choice[call] = 0
            call -= 1
        if call < 0:
            return best
        choice[call] += 1


def excess(problem: Problem, limit_s: float) -> float:
    """Of the search's seconds over the best of the other modes, which have half its limit, and over the best of all
    choices, where they are few; as a fraction, 0 if there is none.

    A limit that ends the search before all options are priced is doubled, since then it has looked at few. Raises
    TimeoutError where MOST_S are too few.
    """
    found_s, limit_s = searched(problem, limit_s)
    seconds: dict[str, float] = {}
    for mode in OTHERS:
        with suppress(PlanError, ProblemError):
            seconds[mode] = find_plan(problem, mode, limit_s / 2).iteration_time_s
    with suppress(ProblemError):
        tables = Tables(problem)
        if math.prod(map(len, tables.options)) <= MOST_CHOICES:
            seconds["enumeration"] = enumerated(tables)
    best_s = min(seconds.values(), default=math.inf)
    more = 0.0 if best_s == math.inf else found_s / best_s - 1
    return more if more > ROUNDING else 0.0


def searched(problem: Problem, limit_s: float) -> tuple[float, float]:
    """The seconds per iteration of the search's plan, infinite where none fits, and the limit in which it priced all
    options: `limit_s`, twice that, and so on up to MOST_S."""
    while limit_s <= MOST_S:
        try:
            result = find_plan(problem, "search", limit_s)
            found_s, late = result.iteration_time_s, result.late
        except (PlanError, ProblemError) as error:
            found_s, late = math.inf, isinstance(error, OptionsTakeTooLongError)
        if not late:
            return found_s, limit_s
        limit_s *= 2
    raise TimeoutError(f"The options of a problem on {problem.cluster} are not priced in {limit_s / 2:g} s.")
