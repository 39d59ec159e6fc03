"""What is checked and decided before anything starts: data, models, plan. Loads no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prefect_rlhf.flows.cluster.engines_beside import check_generation
from prefect_rlhf.flows.cluster.this_machine import cores_here, gpus_here
from prefect_rlhf.flows.pushes import check_push
from prefect_rlhf.flows.rewards import (
    check_agent,
    check_environment,
    check_rewards,
    check_tools,
    literal_secrets,
)
from prefect_rlhf.flows.run.device_loss import refuse_no_shrink
from prefect_rlhf.flows.run.downloads import fetched
from prefect_rlhf.flows.run.examination import refuse_unexamined
from prefect_rlhf.flows.run.planning import (
    ITEMSIZES,
    devices_assumed,
    fastest,
    hardware_of,
    made_plan,
    on_ranks,
    rank_choices,
    shapes_of,
    typed,
)
from prefect_rlhf.flows.run.run_folder import NO_DISK, DiskNeed, disk_need, refuse_full_disk
from prefect_rlhf.flows.trackers import refuse_missing
from prefect_rlhf.planner.plan.build import PlanError, build_plan
from prefect_rlhf.planner.pricing.plans import plan_memory, shortfall
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.report import extrapolation
from prefect_rlhf.planner.search.baselines import check_strategies
from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    MADE_PLANS,
    SEARCHED,
    ConfigError,
    manual_assignments,
)
from prefect_rlhf.rlhf_tasks.algorithms.examples import endless, prepared_rows
from prefect_rlhf.rlhf_tasks.algorithms.held_out import HELD_OUT, evaluation_of, held_out_sets, shared_prompts
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.checkpoint.changes import CHANGES, PLAN, RunPlan, logged_changes, read_plan
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.hub_names import name_of_folder
from prefect_rlhf.rlhf_tasks.config.models import JUDGE, ActorOnly
from prefect_rlhf.rlhf_tasks.config.sampling import Samples, Scores
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.data.dataset import data_set
from prefect_rlhf.rlhf_tasks.data.hub import Pin
from prefect_rlhf.rlhf_tasks.data.token_file import SKIPPED, TokenFile
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import parameters
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import (
    ADAPTER,
    adapter_of,
    base_of,
    beside_weights,
    check_weights,
    has_weights,
)
from prefect_rlhf.rlhf_tasks.spec import EvaluateNode, ExecutionPlan
from prefect_rlhf.rlhf_tasks.user_code.tools.episode import CALL_COLUMNS

PLAN_REMEDY = "Remove it, and the run is planned again."


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that has passed all checks, with its plan.

    config       its models are folders; with a decided `dtype`; of `plan: auto` with the number of ranks that it
                 chose (`fastest`)
    plan         that the run begins by; changes: the later ones that are decided
    problem      what the configuration asks of the planner
    rows         the tokenised data set, which the run keeps; a resumed run must find data of the same digest
    held_out     file in the run folder -> the tokenised rows of its evaluation, likewise
    warnings     a sentence for each figure of planning.device that is implausible, for each file of kept figures that
                 was put aside, for a number of ranks other than the stated one, for prices by extrapolation, for
                 ranks that crowd this machine, and for held-out rows that are among the data
    disk         what the run writes
    pins         what each name on a Hub was resolved to; a run that continues keeps it
    models       the section as its user wrote it
    """

    config: RunConfig
    plan: ExecutionPlan
    problem: Problem
    iterations: int
    rows: TokenFile
    changes: tuple[RunPlan, ...] = ()
    warnings: tuple[str, ...] = ()
    disk: DiskNeed = NO_DISK
    held_out: Mapping[str, TokenFile] = field(default_factory=dict)
    pins: Mapping[str, Pin] = field(default_factory=dict)
    models: ActorOnly | None = None

    @property
    def plans(self) -> tuple[RunPlan, ...]:
        """Which plan each iteration goes by, as far as it is decided."""
        return (RunPlan(iteration=0, plan=self.plan), *self.changes)

    @property
    def named(self) -> RunConfig:
        """The configuration, whose models from a Hub have their names, as its user wrote them."""
        return self.config.model_copy(update={"models": self.models or self.config.models})

    def keep_rows(self, folder: Path) -> None:
        """Leave the tokenised rows in the run's folder, where the ranks read them. Raises OSError."""
        self.rows.keep(folder)
        for name, rows in self.held_out.items():
            rows.keep(folder, name)


def prepare(
    config: RunConfig, folder: Path | None = None, ranks: int | None = None, weights: bool = True
) -> Prepared:
    """Check everything that can be checked before a process starts, and make the plan.

    folder   of a run that has its plan already
    ranks    of a host, where they are decided: those of a cluster that several runs share
    weights  False: for a run without a folder none are downloaded, nor checked where the Hub's cache lacks them
    Raises ConfigError with one sentence that says what to change, whichever part found the fault.
    """
    try:
        return _prepare(config, folder, ranks, weights or folder is not None)
    except ConfigError:
        raise
    except ValueError as error:  # of models, tokenizer, data, graph and meshes, for a user's fault
        raise ConfigError(str(error)) from error


def _prepare(config: RunConfig, folder: Path | None, ranks: int | None, weights: bool) -> Prepared:
    _refuse_what_cannot_run(config)
    of_push = _check_push(config, is_new=folder is None)
    models, (config, pins) = config.models, fetched(config, folder, weights)
    if ranks is not None:
        config = on_ranks(config, ranks)
    config = typed(config, hardware_of(config).classes)
    config, of_export = _exports_what_loads(config)
    shapes = shapes_of(config)
    if "actor" in shapes:
        check_generation(config, shapes["actor"])
    of_weights = _check_models(config, shapes, weights)
    _check_judge(config, shapes)
    vocabulary = min(shape.vocab for role, shape in shapes.items() if role != JUDGE)
    tokenizer = _shared_tokenizer(config, vocabulary)
    rows = prepared_rows(config, folder)
    of_rewards = _check_scores(config, rows.columns, folder)
    held_out, of_evaluation = _held_out(config, folder)
    iterations = config.iterations(len(rows))
    need = disk_need(config, shapes, iterations, ITEMSIZES[config.dtype])
    refuse_full_disk(need, folder or Path(config.output_dir))
    chosen, plan, of_ranks = fastest(
        rank_choices(config, rows.tokens, kept=ranks or _kept_ranks(config, folder)),
        lambda ranks: make_plan(ranks.config, ranks.problem, folder),
        lambda plan: plan,
    )
    config, hardware, problem = chosen
    if config.on_device_loss == "shrink":
        refuse_no_shrink(config)
    of_plan = (
        *hardware.warnings,
        *problem.warnings,
        of_ranks,
        extrapolation(plan, problem.model),
        crowding(config),
        config.warning,
        of_export,
        of_push,
        of_weights,
        endless(config, tokenizer),
    )
    return Prepared(
        config=config,
        plan=plan,
        problem=problem,
        iterations=iterations,
        rows=rows,
        changes=_later_plans(config, problem, folder),
        warnings=(*_skipped(rows), *of_rewards, *of_evaluation, *filter(None, of_plan)),
        disk=need,
        held_out=held_out,
        pins=pins,
        models=models,
    )


def _check_models(config: RunConfig, shapes: Mapping[str, ModelShape], weights: bool) -> str | None:
    """Raises ConfigError for models that cannot be split, begun from or exported. Returns a sentence where weights
    are not here and need not be."""
    elsewhere = dict[str, None]()
    for name, role in config.roles().items():
        refuse_unexamined(role.folder, shapes[name])
        if role.optimizer is not None:  # it is exported
            beside_weights(Path(role.folder))
        adapter, whole = adapter_of(role.folder), base_of(role.folder)
        is_here = has_weights(whole) and (adapter is None or (adapter.folder / ADAPTER).is_file())
        if not weights and not is_here and name_of_folder(str(whole)) != str(whole):
            elsewhere[name_of_folder(role.folder).partition("@")[0]] = None
            continue
        if not role.random_init:  # a head that trains may begin at random
            specs, needs_head = parameters(shapes[name], role.head), role.optimizer is None
            check_weights(Path(role.folder), specs, needs_head)

    if not elsewhere:
        return None
    return f"the weights of {' and '.join(elsewhere)} are not here; a run downloads and checks them when it starts."


def _shared_tokenizer(config: RunConfig, vocabulary: int) -> Tokenizer:
    """The actor's tokenizer. Raises ConfigError where models have another one, or no embeddings for its tokens.

    vocabulary  number of tokens for which every model has embeddings
    """
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    if tokenizer.size > vocabulary:
        raise ConfigError(
            f"the tokenizer of models.actor has {tokenizer.size} tokens, a model has embeddings for {vocabulary}. "
            "All models of a run must share the actor's tokenizer."
        )
    if not isinstance(config, Samples) and tokenizer.eos_id >= vocabulary:
        raise ConfigError(
            f"the end token of {config.models.tokenizer} has the id {tokenizer.eos_id}, a model has embeddings for "
            f"{vocabulary}. Answers get that token at their end: correct eos_token_id in its generation_config.json "
            "and config.json."
        )
    if isinstance(config, Samples) and any(i >= tokenizer.size for i in config.sampling.stop_token_ids):
        raise ConfigError(
            f"sampling.stop has {config.sampling.stop_token_ids[-1]}, but models.actor's tokenizer has "
            f"{tokenizer.size} tokens, from 0. Name ids of its tokens."
        )
    for name, role in config.roles().items():
        if name != JUDGE:  # it reads texts
            tokenizer.refuse_other(role.folder)
    return tokenizer


def _check_judge(config: RunConfig, shapes: Mapping[str, ModelShape]) -> None:
    """Raises ConfigError where the run's judge has no tokenizer, or no embeddings for all its tokens."""
    if JUDGE in shapes:
        folder = config.roles()[JUDGE].folder
        tokens, rows = Tokenizer.from_folder(folder).size, shapes[JUDGE].vocab
        if tokens > rows:
            raise ConfigError(
                f"the tokenizer of models.judge has {tokens} tokens, and the model embeddings for {rows}. Name a "
                "folder whose tokenizer is the model's."
            )


def _check_scores(config: RunConfig, columns: Sequence[str], folder: Path | None) -> list[str]:
    """Warnings about a run's rewards and environment. Raises ConfigError for those that such rows cannot have."""
    is_here, warnings = config.cluster.address is None, list[str]()
    if isinstance(config, Scores):
        if config.environment is not None and not config.tools:
            warnings += check_environment(config.environment, is_here)
        if config.agent is not None and is_here:
            check_agent(config.agent)
        warnings += check_tools(config.tools, is_here)
        columns = [*columns, *(CALL_COLUMNS if config.tools else ())]
        check_rewards(config.scoring_rewards, _beside_prompt(columns), is_here, folder, config.agent)
    return warnings + literal_secrets(config)


def _beside_prompt(columns: Iterable[str]) -> list[str]:
    return [name for name in columns if name != "prompt"]


def _exports_what_loads(config: RunConfig) -> tuple[RunConfig, str | None]:
    """The configuration. If its adapters would lie on an adapter, it exports the whole model instead, with a warning.

    peft and transformers take no adapter whose base is an adapter itself.
    """
    began = [role.folder for role in config.roles().values() if role.optimizer and adapter_of(role.folder)]
    if not isinstance(config, TrainingConfig) or not config.exports_adapters or not began:
        return config, None
    assert config.lora is not None
    whole = config.lora.model_copy(update={"export": "merged"})
    return config.model_copy(update={"lora": whole}), (
        f"lora.export: {began[0]} is an adapter itself, and peft loads no adapter of an adapter, so the run exports "
        "the whole model, merged."
    )


def _check_push(config: RunConfig, is_new: bool) -> str | None:
    """Raises ConfigError where the run's model could not be put on the Hub. Of a run that continues it is a warning:
    its iterations are worth more, and the model can be put there later."""
    target = config.push_to_hub if isinstance(config, TrainingConfig) else None
    if target is None:
        return None
    try:
        check_push(target)
    except ConfigError as error:
        if is_new:
            raise
        return str(error)
    return None


def check_without_models(config: RunConfig) -> list[str]:
    """Check a configuration whose models do not exist yet: its data must exist, and its rewards must fit them.
    Returns warnings. Raises ConfigError."""
    _refuse_what_cannot_run(config)
    _check_push(config, is_new=True)
    config, _ = fetched(config)
    is_here = config.cluster.address is None
    for part in (config, *held_out_sets(config).values()):
        columns = _beside_prompt(next(iter(data_set(part.data))).row)
        if isinstance(part, Scores):
            check_rewards(part.scoring_rewards, columns, is_here, agent=part.agent)
    return literal_secrets(config)


def _held_out(config: RunConfig, folder: Path | None) -> tuple[dict[str, TokenFile], list[str]]:
    """The tokenised rows of a run's evaluation, by file, and warnings about them."""
    sets = {name: prepared_rows(reader, folder, name) for name, reader in held_out_sets(config).items()}
    warnings = [shared] if (shared := shared_prompts(config)) else []
    evaluation, is_here = evaluation_of(config), config.cluster.address is None
    if evaluation is not None:
        columns = [*sets[HELD_OUT].columns, *(CALL_COLUMNS if evaluation.tools else ())]
        check_rewards(evaluation.rewards, _beside_prompt(columns), is_here, folder, evaluation.agent)
    return sets, warnings


def _skipped(rows: TokenFile) -> list[str]:
    """A warning where rows were left out."""
    if not rows.skipped:
        return []
    where, why = rows.skipped[0]
    number = len(rows.skipped)
    left_out = "1 row is skipped" if number == 1 else f"{number} rows are skipped"
    return [f"{left_out}, listed in {SKIPPED} of the run folder. {where}: {why}"]


def crowding(config: RunConfig) -> str | None:
    """A warning where ranks of our own cluster share the cores of this machine."""
    ranks, cores = config.cluster.n_devices, cores_here()
    if config.cluster.address is not None or gpus_here() or ranks <= 2 * cores:
        return None
    return (
        f"{ranks} ranks (cluster.n_hosts x devices_per_host) share the {cores} CPU cores of this machine: to start "
        "them takes minutes and much memory. Ask for fewer, or name a cluster by cluster.address."
    )


def make_plan(config: RunConfig, problem: Problem, folder: Path | None = None) -> ExecutionPlan:
    """The execution plan of a configuration: by hand where it names assignments, searched, or by the heuristic.

    problem  what the configuration asks of the planner
    A search is made once in a run's life: where `folder` has its plan, that is it.
    Raises PlanError or ProblemError, with device, bytes and remedy, where the plan does not fit memory.
    """
    manual = manual_assignments(config)
    if folder is not None and _keeps_plan(config, folder):
        plan = read_plan(folder / PLAN, PLAN_REMEDY)
        _refuse_other(plan, folder / PLAN, problem)
    elif manual is not None:
        check_strategies(problem.graph, problem.model, manual)
        plan = build_plan(problem.graph, manual, problem.cluster)
    else:
        return made_plan(config, problem)
    problem.refuse(plan)
    missing = shortfall(plan_memory(plan, problem.model), problem.model)
    if missing is not None:
        raise PlanError(missing + devices_assumed(config, problem))
    return plan


def _evaluation(role: str, at_start: bool) -> str:
    return f"evaluation of {role}{' at the start' if at_start else ''}"


def _kept_ranks(config: RunConfig, folder: Path | None) -> int | None:
    """Ranks per host in the plan that was searched for a run; None if there is no plan yet."""
    if folder is None or not _keeps_plan(config, folder):
        return None
    return read_plan(folder / PLAN, PLAN_REMEDY).devices_per_host


def _keeps_plan(config: RunConfig, folder: Path) -> bool:
    """Whether a run keeps the plan in its folder: one that was searched, or that has changed, and that its user has
    not removed."""
    made = config.plan in SEARCHED or (config.plan in MADE_PLANS and (folder / CHANGES).exists())
    return made and (folder / PLAN).exists()


def _later_plans(config: RunConfig, problem: Problem, folder: Path | None) -> tuple[RunPlan, ...]:
    """The plans that a run has changed to; none where its first plan is made anew."""
    if folder is None or not _keeps_plan(config, folder):
        return ()
    changes = logged_changes(folder)
    for number, change in enumerate(changes, 2):
        _refuse_other(change.plan, folder / f"plan-{number}.json", problem)
    return changes


def _refuse_other(plan: ExecutionPlan, path: Path, problem: Problem) -> None:
    """Raises ConfigError where a plan in a run folder is another run's."""
    graph, cluster = problem.graph, problem.cluster
    planned = [
        *(call for call, nodes in plan.calls.items() for _ in nodes),
        *(_evaluation(node.role, node.at_start) for node in plan.nodes if isinstance(node, EvaluateNode)),
        *(f"{role} follows {where.follows}" for role, where in plan.roles.items() if where.follows),
        *(f"{call} {nodes[0].lead} ahead" for call, nodes in plan.calls.items() if nodes[0].lead),
        *(
            f"{call} decides {one.name}"
            for call, nodes in plan.calls.items()
            for one in nodes[0].call.decides
        ),
    ]
    asked = [
        *(call.name for call in graph.calls for _ in call.nodes),
        *(_evaluation(role, False) for role in graph.evaluated),
        *(_evaluation(role, True) for role in graph.evaluated if graph.on_start),
        *(f"{role} follows {leader}" for role, leader in graph.follows.items()),
        *(f"{call.name} {call.lead} ahead" for call in graph.calls if call.lead),
        *(f"{call.name} decides {one.name}" for call in graph.calls for one in call.decides),
    ]
    remedy = f"Remove {'it' if path.name == PLAN else path.parent / PLAN}, and the run is planned again."
    if (sorted(planned), plan.n_seqs) != (sorted(asked), graph.n_seqs):
        raise ConfigError(
            f"{path} is the plan of another graph ({plan.algorithm}, {plan.n_seqs} sequences: {', '.join(planned)}). "
            f"{remedy}"
        )
    fewer = path.name != PLAN and plan.n_devices < cluster.n_devices  # of a run that has lost devices
    if not fewer and (plan.n_devices, plan.devices_per_host) != (
        cluster.n_devices,
        cluster.devices_per_host,
    ):
        raise ConfigError(
            f"{path} is a plan for {plan.n_devices} devices, {plan.devices_per_host} to a host; the cluster "
            f"is {cluster}. {remedy}"
        )


def _refuse_what_cannot_run(config: RunConfig) -> None:
    """Raises ConfigError for a configuration that is enough to plan with but not to run, an algorithm that lacks a
    function, and a tracker that is not installed."""
    refuse_missing(config.report_to)
    algorithm(config.type).calls(config)  # here, before minutes go into checking data
    for role in type(config.models).model_fields:
        if isinstance(getattr(config.models, role), dict):
            raise ConfigError(
                f"models.{role} is an inline config, which has no weights: enough to plan, not to run. "
                "Name a Hugging Face model folder."
            )
