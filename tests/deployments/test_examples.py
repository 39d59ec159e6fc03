"""The examples: each loads, those to plan with their variants; small ones are planned by the heuristic, and fit."""

from pathlib import Path

import pytest

from prefect_rlhf import deployments
from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.commands.rehearsals import effective_share, rehearsable, rehearsed
from prefect_rlhf.flows.run.planning import hardware_of, problem_of
from prefect_rlhf.planner.pricing.device_classes import read_cluster
from prefect_rlhf.planner.pricing.plans import shortfall
from prefect_rlhf.planner.search.baselines import heuristic_plan, priced_plan
from prefect_rlhf.planner.search.search import find_plan
from prefect_rlhf.rlhf_tasks.algorithms.configurations import load_config, load_pipeline, stages_of
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, algorithm_names
from prefect_rlhf.rlhf_tasks.algorithms.series import load_series, stages_of_run
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.rehearsal.assumptions import Machines
from prefect_rlhf.rlhf_tasks.spec import CallAssignment

EXAMPLES = Path(deployments.__file__).with_name("examples").resolve()
LONGEST = ["sampling.max_completion_length=896", "batch_size=128"]
HOSTS = {
    "plan-ppo-7b-7b": 1,
    "plan-ppo-13b-7b": 2,
    "plan-ppo-34b-7b": 4,
    "plan-ppo-70b-7b": 8,
    "plan-ppo-70b-7b-two-classes": 8,
    "plan-ppo-70b-70b": 16,
    "plan-ppo-7b-34b": 4,
    "plan-grpo-7b": 2,
    "plan-grpo-72b": 16,
    "plan-grpo-7b-8k": 2,
    "plan-grpo-7b-32k": 1,
    "plan-grpo-72b-32k": 16,
    "plan-1024-gpus": 128,
    "plan-16384-gpus": 2048,
}
SMALL = [name for name, hosts in HOSTS.items() if hosts <= 16]


def overrides_of(name: str) -> list[list[str]]:
    """The variants that the example's head names."""
    if "ppo" in name:
        return [[], ["sampling.max_completion_length=384", "batch_size=256"], LONGEST]
    if name.endswith("k"):
        return [[]]  # the answers are long as it is
    return [
        [],
        ["sampling.max_completion_length=8192", "batch_size=512"],
        ["sampling.max_completion_length=32768", "batch_size=128"],
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("ppo", "grpo", "grpo-lora", "judge-grpo", "sft", "dpo", "kto"),
        *("guessing-grpo", "guessing-agent-grpo", "gsm8k-grpo"),
    ],
)
def test_an_example_to_run_is_of_the_algorithm_in_its_name_and_can_be_drawn(name):
    config = load_config(EXAMPLES / f"{name}.yaml")
    assert config.type in name.split("-")
    assert [call.name for call in algorithm(config.type).calls(config)][-1].endswith("_train")


def test_the_example_of_ids_says_offline_what_is_missing(capsys):
    assert run_command(["config", "validate", str(EXAMPLES / "gsm8k-grpo.yaml")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: Qwen/Qwen3-0.6B is no file or folder here, and HF_HUB_OFFLINE is set")
    assert err.count("\n") == 1


def test_the_example_of_a_series_trains_and_evaluates():
    series = load_series(EXAMPLES / "series.yaml")
    _, stages = stages_of_run(series, "0002", "rows.jsonl", EXAMPLES)
    assert {name: stage.type for name, stage in stages.items()} == {
        "train": "sft",
        "candidate": "evaluate",
        "champion": "evaluate",
    }


def test_every_example_to_plan_is_known_here():
    found = {path.stem for path in EXAMPLES.glob("plan-*.yaml")} - {
        "plan-cluster",
        "plan-cluster-eager",
        "plan-cluster-two-classes",
    }
    assert found == set(HOSTS)


def test_the_page_of_algorithms_has_every_one_that_learns_from_its_samples():
    page = (EXAMPLES.parents[1] / "docs" / "algorithms.md").read_text()
    learning = [
        name
        for name in algorithm_names()
        if issubclass(algorithm(name).config, Scores) and issubclass(algorithm(name).config, TrainingConfig)
    ]
    assert {"ppo", "dapo", "rloo", "expert_iteration"} <= set(learning)
    assert [name for name in learning if f"`{name.replace('_', '-')}`" not in page] == []


@pytest.mark.parametrize("name", HOSTS)
def test_an_example_is_a_problem_on_its_cluster(name):
    config = load_config(EXAMPLES / f"{name}.yaml")
    problem = problem_of(config, hardware_of(config))
    assert problem.cluster.n_devices == 8 * HOSTS[name]
    assert set(problem.graph.roles) >= {"actor", "ref"}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_example_fits_under_the_heuristic(name):
    times = []
    for overrides in overrides_of(name):
        config = load_config(EXAMPLES / f"{name}.yaml", overrides)
        problem = problem_of(config, hardware_of(config))
        found = heuristic_plan(problem)
        assert shortfall(found.price, problem.model) is None
        times.append(found.price.iteration_time_s)
    assert times == sorted(times), "the longer the answers, the longer an iteration"


QUICK = ["plan-ppo-7b-7b", "plan-grpo-7b"]
"""Whose rehearsals take a few seconds together."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in (*SMALL, "plan-1024-gpus")
    ],
)
def test_an_example_of_7b_to_72b_rehearses_a_day_without_a_false_fault(name):
    """Its commits, restores and loads come nowhere near a limit, and cost little."""
    run = rehearsable(load_config(EXAMPLES / f"{name}.yaml"))
    found = rehearsed(run, hours=24.0, machines=Machines(), noise=0.05, seed=0)
    assert found.finished, found.ended
    assert (found.story.faults, found.false_faults) == ([], [])
    assert list(found.watch.near) == []
    assert effective_share(found, run.costs) > 0.95


def test_a_rehearsal_draws_ahead_and_in_segments():
    """The first iteration draws all that is due before it trains, and the last ones draw nothing."""
    changes = ["total_iterations=6", "staleness=2", "sampling.segment_tokens=64", "plan=heuristic"]
    run = rehearsable(load_config(EXAMPLES / "plan-grpo-7b.yaml", changes))
    generation = run.plan.node("actor_generate")
    first, second, *_, draws_last, nothing, _ = (run.costs.seconds(generation, t) for t in range(6))
    assert first == pytest.approx(4 * second)
    assert draws_last > second > nothing == 0
    found = rehearsed(run, hours=24.0, machines=Machines(), noise=0.0, seed=0)
    assert found.finished, found.ended
    assert found.story.faults == []


def test_the_cluster_of_two_classes_is_read_and_planned_for():
    hardware = read_cluster(EXAMPLES / "plan-cluster-two-classes.yaml")
    h100, a100 = hardware.classes.profiles
    assert (h100.name, a100.name, hardware.warnings) == ("h100-sxm", "a100-80g-100gb", ())
    assert hardware.classes.of_host == (0,) * 4 + (1,) * 4
    assert (h100.between_hosts.bytes_per_s, a100.between_hosts.bytes_per_s) == (50e9, 12.5e9)
    config = load_config(EXAMPLES / "plan-ppo-70b-7b.yaml")
    problem = problem_of(config, hardware)
    found = heuristic_plan(problem)
    assert shortfall(found.price, problem.model) is None


def test_the_cluster_file_is_read_without_warnings():
    hardware = read_cluster(EXAMPLES / "plan-cluster.yaml")
    (device,) = hardware.classes.profiles
    assert (hardware.cluster.n_devices, device.name, hardware.warnings) == (32, "a100-80g-sxm", ())
    assert device.between_hosts.bytes_per_s == 25e9


def test_decoding_without_cuda_graphs_is_priced_as_it_was_measured_and_with_them_as_it_is_not():
    """ReaL (arXiv:2406.14088, table 1), without CUDA graphs, takes 29.8 s under pipeline parallelism and 37.1 s under
    tensor parallelism. Two figures of the file are fitted to these two, for sizes that are assumed. The preset is of
    our engine, which has CUDA graphs: there both take less than half as long, and tp=8 is the faster one."""
    changes = ["sampling.max_completion_length=896", "batch_size=128"]
    config = load_config(EXAMPLES / "plan-ppo-7b-7b.yaml", changes)

    def seconds(hardware) -> list[float]:
        problem, devices = problem_of(config, hardware), tuple(range(8))
        generate = problem.graph.call("actor_generate")
        strategies = ParallelStrategy(1, 1, 8), ParallelStrategy(1, 8, 1)
        return [
            problem.model.call(generate, CallAssignment(placement=Placement(devices, strategy))).seconds
            for strategy in strategies
        ]

    eager = read_cluster(EXAMPLES / "plan-cluster-eager.yaml")
    assert eager.warnings == ()
    assert seconds(eager) == pytest.approx([29.8, 37.1], rel=0.03)
    pipeline_s, tensor_s = seconds(hardware_of(config))
    assert tensor_s < pipeline_s < 29.8 / 2


@pytest.mark.parametrize(
    ("name", "tokens", "n_seqs"), [("plan-grpo-7b-8k", 8192, 512), ("plan-grpo-72b-32k", 32768, 128)]
)
def test_an_example_with_long_answers_is_the_variant_that_the_short_ones_head_names(name, tokens, n_seqs):
    short = load_config(
        EXAMPLES / f"{name.rpartition('-')[0]}.yaml",
        [f"sampling.max_completion_length={tokens}", f"batch_size={n_seqs}"],
    )
    assert load_config(EXAMPLES / f"{name}.yaml") == short


def test_long_sequences_of_one_host_are_divided_over_its_gpus_where_that_is_faster():
    """Two groups of samples a mini-batch leave no more than two dp ranks; the rest of 8 GPUs is tp, or cp."""
    config = load_config(EXAMPLES / "plan-grpo-7b-32k.yaml")
    problem = problem_of(config, hardware_of(config))
    found = find_plan(problem, "search", 20.0)
    train = found.plan.calls["actor_train"][0].placement.strategy
    assert (train.dp, train.cp > 1) == (2, True)
    by_tp = {name: nodes[0].assignment for name, nodes in found.plan.calls.items()}
    by_tp["actor_train"] = by_tp["actor_train"].model_copy(
        update={"placement": Placement(tuple(range(8)), ParallelStrategy(2, 4, 1)), "micro_batches": 8}
    )
    others = priced_plan(problem.graph, problem.model, by_tp).price
    assert found.iteration_time_s < 0.99 * others.iteration_time_s


def test_the_evaluation_and_the_pipeline_are_sound_and_fit_each_other():
    alone = load_config(EXAMPLES / "evaluate.yaml")
    stages = stages_of(load_pipeline(EXAMPLES / "pipeline.yaml"))
    assert {name: config.type for name, config in stages.items()} == {
        "sft": "sft",
        "reward-model": "reward_model",
        "before": "evaluate",
        "ppo": "ppo",
        "after": "evaluate",
    }
    folder = Path.cwd() / "runs" / "my-model"
    assert stages["ppo"].models.actor == str(folder / "sft" / "model")
    assert stages["ppo"].models.reward == str(folder / "reward-model" / "model")
    assert stages["after"].models.actor == str(folder / "ppo" / "model")
    assert stages["before"].sampling == stages["after"].sampling == alone.sampling
    for config in stages.values():
        assert config.output_dir == str(folder)
        if isinstance(config, TrainingConfig) and config.evaluation is not None:
            assert config.evaluation.data == str(Path.cwd() / "data" / "held_out.jsonl")
