"""From a run's configuration to the planner's problem: graph, models, workload, cluster, number of ranks.

The number of ranks is the stated one, or this machine's choice; on CPUs a measured one. The ranks of a cluster of our
own share this machine's cores, so fewer CPU ranks have more threads each. Which number is faster depends on model and
machine, and no figure of a device shows it. So numbers of ranks are compared only if each has a measured profile,
with the threads that its ranks have. Loads no torch.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from prefect_rlhf.flows.cluster.shutdown import run_in_thread
from prefect_rlhf.flows.cluster.this_machine import (
    CPU_SLOT,
    cores_here,
    device_here,
    gpus_here,
    ranks_here,
    threads_of_ranks,
)
from prefect_rlhf.flows.rewards import judge_of
from prefect_rlhf.planner.plan.build import PlanError
from prefect_rlhf.planner.plan.graph import DataflowGraph
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import (
    EvaluationWork,
    JudgeWork,
    Lengths,
    OtherEngine,
    RoleModel,
    Thinking,
    Workload,
)
from prefect_rlhf.planner.pricing.analytic import computed_profile, recalibrated
from prefect_rlhf.planner.pricing.calls import CostModel
from prefect_rlhf.planner.pricing.device_classes import (
    DeviceClasses,
    Hardware,
    cluster_of,
    named_hardware,
    read_cluster,
)
from prefect_rlhf.planner.pricing.devices import DeviceProfile, estimated
from prefect_rlhf.planner.pricing.figures import (
    FiguresError,
    MeasuredProfile,
    ProfileError,
    cached,
    figures_file,
    read_figures,
    read_kept,
    read_profiles,
)
from prefect_rlhf.planner.pricing.plans import price_plan
from prefect_rlhf.planner.pricing.pools import pools_of
from prefect_rlhf.planner.pricing.problem import Problem
from prefect_rlhf.planner.search.balance import balanced
from prefect_rlhf.planner.search.baselines import heuristic_plan
from prefect_rlhf.planner.search.search import SearchResult, find_plan
from prefect_rlhf.rlhf_tasks.algorithms.configurations import MADE_PLANS, SEARCHED, ConfigError
from prefect_rlhf.rlhf_tasks.algorithms.examples import learns_from_pairs, shared_tokens
from prefect_rlhf.rlhf_tasks.algorithms.examples import prompt_tokens as tokens_of_prompts
from prefect_rlhf.rlhf_tasks.algorithms.held_out import (
    completions_of,
    evaluation_of,
    rows_at_once,
    section_of,
)
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.generation import OPENAI, VLLM, longest_wait_s
from prefect_rlhf.rlhf_tasks.config.hub_names import FORM_OF_MODEL
from prefect_rlhf.rlhf_tasks.config.models import JUDGE, Role
from prefect_rlhf.rlhf_tasks.config.reference import MovesReference
from prefect_rlhf.rlhf_tasks.config.responses import EnvironmentConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Samples, Scores
from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig
from prefect_rlhf.rlhf_tasks.data.dataset import data_set
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.profiling.measurements import Grid
from prefect_rlhf.rlhf_tasks.spec import CallNode, EvaluateNode, ExecutionPlan, ModelFunctionCall
from prefect_rlhf.rlhf_tasks.user_code.agents.process import longest_agents_s
from prefect_rlhf.rlhf_tasks.user_code.environments import longest_play_s
from prefect_rlhf.rlhf_tasks.user_code.rewards import longest_s

COMPARED = ("search", "mcmc", "heuristic", "symmetric", "hybrid", "disjoint", "colocated")
"""The modes of the planner that find a plan by themselves."""

SHORT_S = 5.0  # of a search that is made only to compare

PROFILES = "profiles"  # folder of measured profiles, in the output folder

T = TypeVar("T")

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float64": 8}


def problem_of(
    config: RunConfig,
    hardware: Hardware,
    profile: Path | None = None,
    prompt_tokens: Sequence[int] | None = None,
) -> Problem:
    """What a configuration asks of the planner on some hardware.

    A model with a profile of all hosts of a device class is priced there by the profile. Others are priced by the
    device's figures, recalibrated. If earlier runs of a call drifted from their plan, their measurements correct its
    price.

    profile  a file of `prefect-rlhf profile --out` to take the profiles from; default: `profile_folder`
    Raises ConfigError with one sentence for impossible models, lengths, graphs and profiles.
    """
    try:
        config = typed(config, hardware.classes)
        return _problem(config, hardware, profile, workload_of(config, prompt_tokens))
    except ConfigError:
        raise
    except ValueError as error:  # what models, data and graph raise for a user's fault
        raise ConfigError(str(error)) from error


def _problem(config: RunConfig, hardware: Hardware, profile: Path | None, workload: Workload) -> Problem:
    shapes = shapes_of(config)
    _check_followers(config, shapes)
    _check_dtype(config, hardware.classes)
    models = {
        role: RoleModel(
            shape=shapes[role],
            head=parts.head,
            lora=config.adapters_of(role, shapes[role]),
            weights=parts.folder or json.dumps(parts.config, sort_keys=True),
        )
        for role, parts in config.roles().items()
    }
    _check_context(shapes, workload)
    classes, measured, warnings = hardware.classes, list[MeasuredProfile](), list[str]()
    stated = None if profile is None else _stated_profiles(profile, classes)
    for number, device in enumerate(classes.profiles):
        if stated is not None:
            of_class = tuple(one for one in stated if one.device == device.name)
        else:
            own = classes.part(number)
            threads = _threads(config, hardware)
            of_class, refused = cached(
                profile_folder(config), device.name, own, models, workload.itemsize, threads
            )
            warnings += refused
        if of_class:
            profiles = list(classes.profiles)
            profiles[number] = recalibrated(device, of_class[0])
            classes = replace(classes, profiles=tuple(profiles))
        elif warning := estimated(device):
            warnings.append(warning)
        measured += of_class
    graph, cluster = graph_of(config), hardware.cluster
    pools = pools_of(config.planning.pools, graph, cluster)
    uncorrected = Problem(graph, CostModel(cluster, classes, models, workload, measured), pools=pools)

    def corrected(path: Path) -> CostModel:
        model = CostModel(cluster, classes, models, workload, measured, read_figures(path))
        _refuse_absurd(path, model, graph.calls)
        return model

    model, refused = read_kept(figures_of(config, uncorrected), corrected, uncorrected.model)
    return Problem(graph, model, warnings=(*warnings, *refused), pools=pools)


def _threads(config: RunConfig, hardware: Hardware) -> int:
    """Threads of each rank; 0 where others decide that, or where it does not matter."""
    here = config.cluster.address is None and hardware.cluster.n_devices == config.cluster.n_devices
    slots = hardware.classes.profile(0).name == CPU_SLOT
    return threads_of_ranks(config.cluster.n_devices) if here and slots else 0


def _refuse_absurd(path: Path, model: CostModel, calls: Iterable[ModelFunctionCall]) -> None:
    """Raises FiguresError when the figures of runs in a file cannot be of this cluster: their assignments have other
    devices or no such strategy, or they take more memory than a device has."""
    most_bytes = max(device.memory_bytes for device in model.classes.profiles)
    for ran in model.history:
        if max(ran.assignment.placement.devices) >= model.cluster.n_devices:
            raise FiguresError(
                f"{path} has figures of {ran.call} on devices that {model.cluster} does not have."
            )
        if ran.active_bytes is not None and ran.active_bytes > most_bytes:
            raise FiguresError(
                f"{path} has {ran.active_bytes:g} bytes for {ran.call}, more than the {most_bytes} of a device."
            )
    for call in calls:
        try:
            model.correction(call)
        except ValueError as error:
            raise FiguresError(f"{path} has impossible figures of {call.name}: {error}") from None


def _stated_profiles(path: Path, classes: DeviceClasses) -> tuple[MeasuredProfile, ...]:
    """The profiles in a file that are of the cluster, or of all hosts of one of its classes.

    Others in the file are left out: it may have profiles of several numbers of CPU ranks. Raises ProfileError
    where there is none: one of a smaller or larger cluster lacks figures of collectives, or has them of other links.
    """
    profiles = read_profiles(path)
    if not profiles:
        raise ProfileError(
            f"{path} has no profile in it. Measure again with prefect-rlhf profile --out FILE."
        )
    parts = {device.name: classes.part(number) for number, device in enumerate(classes.profiles)}
    fitting = tuple(p for p in profiles if parts.get(p.device) == Cluster(p.n_hosts, p.devices_per_host))
    for profile in () if fitting else profiles:
        its_cluster = Cluster(profile.n_hosts, profile.devices_per_host)
        if profile.device not in parts:
            raise ProfileError(
                f"{path} has a profile of {profile.device}; the cluster has {', '.join(parts)}. Measure the run's "
                "devices with prefect-rlhf profile, or name the cluster's by --cluster or planning.device."
            )
        if parts[profile.device] != its_cluster:
            raise ProfileError(
                f"{path} is of {its_cluster} {profile.device}; the cluster has {parts[profile.device]} of "
                "them. Measure on a cluster of that size with prefect-rlhf profile."
            )
    return fitting


def figures_of(config: RunConfig, problem: Problem) -> Path:
    """Where the figures of runs of a configuration's calls are kept."""
    m = problem.model
    of_user = {"rewards", "environment", "agent", "tools"}
    users = config.model_dump_json(include=of_user) if isinstance(config, Scores) else ""
    return figures_file(profile_folder(config), m.classes, m.models, m.workload, problem.graph.calls, users)


def profile_folder(config: RunConfig) -> Path:
    """Where measured profiles of a configuration's models are kept."""
    return Path(config.output_dir) / PROFILES


def measured_folders(config: RunConfig) -> dict[ModelShape, str]:
    """A folder for each shape among a configuration's models: of its files a profile needs config.json alone.

    Raises ConfigError for an inline model.
    """
    folders: dict[ModelShape, str] = {}
    shapes = shapes_of(config)
    for role, parts in config.roles().items():
        if not parts.folder:
            raise ConfigError(
                f"models of role {role!r} are given inline: only models in folders can be measured. "
                "Name a Hugging Face model folder."
            )
        folders.setdefault(shapes[role], parts.folder)
    return folders


def computed_profiles(config: RunConfig) -> list[MeasuredProfile]:
    """One profile for each shape among a configuration's models, inline ones too, as its device's figures say.

    Raises ConfigError as `problem_of` and `only_device` do.
    """
    hardware = hardware_of(config)
    device, workload = only_device(hardware), problem_of(config, hardware).model.workload
    return [
        computed_profile(device, hardware.cluster, shape, grid_of(config, workload, shape), workload.itemsize)
        for shape in dict.fromkeys(shapes_of(config).values())
    ]


def only_device(hardware: Hardware) -> DeviceProfile:
    """The device of a cluster. Raises ConfigError where it has several classes: a profile is of one."""
    if len(hardware.classes.profiles) > 1:
        raise ConfigError(
            f"the cluster has devices of several classes ({hardware.classes}): a profile is of one. Make one of each "
            "class on a cluster of all its hosts."
        )
    return hardware.classes.profile(0)


def grid_of(config: RunConfig, workload: Workload, shape: ModelShape) -> Grid:
    """The points that a profile of a model has: they enclose the work of a configuration's runs."""
    longest = min(workload.prompt_tokens + workload.longest_response, shape.context)
    return Grid.around(config.batch_size, workload.prompt_tokens, longest, shape.context)


def shapes_of(config: RunConfig) -> dict[str, ModelShape]:
    """Role -> its model's shape, read from its folder or its inline configuration."""
    return {role: _shape(role, parts) for role, parts in config.roles().items()}


def graph_of(config: RunConfig) -> DataflowGraph:
    """The dataflow graph that a configuration describes."""
    record = algorithm(config.type)
    asked = section_of(config)
    evaluated = () if asked is None else ("actor",)
    return DataflowGraph(
        record.calls(config),
        record.dataset_keys,
        name=record.name,
        evaluated=evaluated,
        on_start=asked is not None and asked.on_start,
        follows=config.follows,
    )


def hardware_of(config: RunConfig, cluster_file: Path | None = None) -> Hardware:
    """The cluster in a file, or the one that the configuration names. Raises ConfigError."""
    if cluster_file is not None:
        return read_cluster(cluster_file)
    stated, device = config.cluster, config.planning.device
    cluster = cluster_of(stated.n_hosts, stated.per_host, "cluster")
    if device is None:  # a cluster of our own has all its hosts here
        profile = device_here(stated.n_devices if stated.address is None else stated.per_host)
        return Hardware(DeviceClasses.alike(cluster, profile))
    if isinstance(device, str):
        return named_hardware(cluster, device)
    return named_hardware(cluster, [(n_hosts, one) for one, n_hosts in device.items()])


def typed(config: RunConfig, classes: DeviceClasses) -> RunConfig:
    """The configuration with its `dtype` decided for the devices of a cluster: `auto` is bfloat16 where all are GPUs
    that multiply it, else float32."""
    if config.dtype != "auto":
        return config
    wide = any(device.is_on_host or not device.has_bfloat16 for device in classes.profiles)
    return config.model_copy(update={"dtype": "float32" if wide else "bfloat16"})


def workload_of(config: RunConfig, prompt_tokens: Sequence[int] | None = None) -> Workload:
    """Lengths and number formats of an iteration. The configuration is `typed`.

    prompt_tokens  tokens of some of the data's prompts; default: some of the data are read
    `planning.prompt_tokens`, where it is given, counts instead of the data's; then all have that length.
    """
    planning = config.planning
    if planning.prompt_tokens is not None:
        prompt_tokens = [planning.prompt_tokens]
    elif prompt_tokens is None:
        prompt_tokens = tokens_of_prompts(config)
    prompt, uneven = _mean(prompt_tokens), len(set(prompt_tokens)) > 1
    longest, played = None, config.environment if isinstance(config, Scores) else None
    if isinstance(config, Samples):
        longest = config.sampling.max_completion_length
        shares = planning.new_tokens or {longest: 1.0}
        if max(shares) > longest:
            raise ConfigError(
                f"planning.new_tokens has {max(shares)} tokens, but sampling.max_completion_length is {longest}. "
                "Shorten the one or raise the other."
            )
    else:  # nothing is generated: a row's last token stands for the new one
        prompt, shares = max(1, prompt - 1), {1: 1.0}
    mean, pairs = sum(tokens * share for tokens, share in shares.items()), learns_from_pairs(config)
    return Workload(
        prompt_tokens=prompt,
        prompt_lengths=Lengths.of(prompt_tokens) if uneven else None,
        longest_prompt=max(prompt_tokens) if uneven and longest is not None else None,
        new_tokens=Lengths(points=tuple(sorted(shares.items()))),
        max_new_tokens=longest,
        thinking=None if played is None else _thinking(config, played, mean),
        agents=isinstance(config, Scores) and config.agent is not None,
        answers=2 if pairs else 1,
        # Where `planning.prompt_tokens` counts instead of the data, nobody knows what the answers of a pair share.
        shared_tokens=shared_tokens(config) if pairs and planning.prompt_tokens is None else 0.0,
        top_k=isinstance(config, Samples) and config.sampling.top_k > 0,
        top_p=isinstance(config, Samples) and config.sampling.top_p < 1,
        counted_tokens=None if longest is None else mean,
        epochs=config.passes,
        itemsize=ITEMSIZES[config.dtype],
        recompute=config.gradient_checkpointing if isinstance(config, TrainingConfig) else "none",
        micro_batch_tokens=config.micro_batch_tokens if isinstance(config, TrainingConfig) else None,
        reward_s=planning.reward_seconds_per_sequence,
        evaluation=_evaluation(config),
        sync_every=config.ref_model_sync_steps if isinstance(config, MovesReference) else 1,
        other=_other_engine(config),
        judge=_judge(config, prompt, max(prompt_tokens), round(mean)),
    )


def _judge(config: RunConfig, prompt: int, longest: int, response: int) -> JudgeWork | None:
    """What the run's judge reads and draws for a sample; None where it has none.

    prompt, longest  tokens of the mean and the longest prompt; response: mean tokens of a response
    """
    if not isinstance(config, Scores) or (reward := config.judged_by_a_role) is None:
        return None
    asks, template = judge_of(reward, config.roles()[JUDGE].folder)
    return JudgeWork(
        prompt_tokens=template + prompt + response,
        longest=template + longest + config.sampling.max_completion_length,
        new_tokens=asks.max_tokens,
        questions=asks.asks,
    )


def _thinking(config: RunConfig, played: EnvironmentConfig, tokens: float) -> Thinking:
    """For how long environments are waited for: as long for each turn as is stated. tokens: of a response"""
    seconds = played.turns_of(tokens) * config.planning.environment_seconds_per_turn
    # Other engines draw one turn at a time.
    return Thinking(
        together=played.together or _other_engine(config) is not None, mean_s=seconds, longest_s=seconds
    )


def _other_engine(config: RunConfig) -> OtherEngine | None:
    """What the run's own ranks do not draw with; a class of the user's is priced as these."""
    if not isinstance(config, Samples):
        return None
    of_vllm = OtherEngine(copies=2, kv_bytes=config.generation.kv_bytes)
    return {VLLM: of_vllm, OPENAI: OtherEngine(copies=2)}.get(config.generation.engine)


def _mean(tokens: Sequence[int]) -> int:
    """The mean length in whole tokens, at least 1."""
    return round(sum(tokens) / max(len(tokens), 1)) or 1


def _evaluation(config: RunConfig) -> EvaluationWork | None:
    """What a run's evaluation generates; the held-out rows are counted. Raises DataError."""
    asked, stated = section_of(config), config.planning.prompt_tokens
    if asked is None:
        return None
    answers, completions = evaluation_of(config), completions_of(config)
    rows = data_set(config.data.model_copy(update={"train": asked.data})).count()
    sizes: dict[str, int] = {}
    if answers is not None:
        sizes["answers"] = asked.num_generations
        sizes["prompt_tokens"] = stated or _mean(tokens_of_prompts(answers))
        sizes["new_tokens"] = answers.sampling.max_completion_length
    if completions is not None:
        sizes["completion_tokens"] = stated or _mean(tokens_of_prompts(completions))
    return EvaluationWork(every=asked.every, rows=rows, rows_at_once=rows_at_once(config), **sizes)


def _check_followers(config: RunConfig, shapes: Mapping[str, ModelShape]) -> None:
    """Raises ConfigError where a role follows one with another architecture."""
    for role, leader in config.follows.items():
        if difference := shapes[role].difference(shapes[leader]):
            told = ", ".join(f"{name} {ours} and {theirs}" for name, (ours, theirs) in difference.items())
            raise ConfigError(
                f"sync_ref_model: the models of {role!r} and {leader!r} cannot be blended, they differ: {told}. Name "
                "models of one architecture."
            )


def _check_dtype(config: RunConfig, classes: DeviceClasses) -> None:
    for device in classes.profiles:
        if config.dtype == "bfloat16" and not device.has_bfloat16:
            raise ConfigError(
                f"dtype=bfloat16: a {device.name} does not compute in it; GPUs of compute capability 8.0 or more do. "
                "Set dtype=float32, or run on other devices."
            )


def _check_context(shapes: dict[str, ModelShape], workload: Workload) -> None:
    for role, shape in shapes.items():
        work = workload.judge
        if role == JUDGE and work is not None:
            if work.longest + work.new_tokens > shape.context:
                raise ConfigError(
                    f"a question to the judge of {work.longest} tokens (its template, a prompt and an answer) and a "
                    f"reply up to max_tokens={work.new_tokens} more exceed the {shape.context} positions of role "
                    f"{role!r}. Shorten them or choose another model."
                )
            continue
        if workload.prompt_tokens + workload.longest_response > shape.context:
            raise ConfigError(
                f"a prompt of {workload.prompt_tokens} tokens and an answer up to "
                f"{workload.longest_response} more exceed the {shape.context} positions of "
                f"role {role!r}. Shorten them or choose another model."
            )


def _shape(role: str, parts: Role) -> ModelShape:
    if parts.config is not None:
        return ModelShape.from_config(parts.config, source=f"inline config of {role}")
    if not Path(parts.folder).is_dir():
        raise ConfigError(
            f"the folder of role {role!r}, {parts.folder}, is not there. Name a Hugging Face model folder."
            f"{FORM_OF_MODEL}"
        )
    return read_shape(parts.folder)


def compare(
    problem: Problem, known: SearchResult, limits_s: Mapping[str, float], seed: int
) -> dict[str, SearchResult | str]:
    """Mode -> its plan, or a sentence if it finds no plan that fits. A plan written by hand is included as `manual`.

    known     is taken as it is for its mode
    limits_s  of the modes that search until a limit (`limits_of`)
    """
    results: dict[str, SearchResult | str] = {known.mode: known} if known.mode not in COMPARED else {}
    for mode in COMPARED:
        try:
            limit_s = limits_s.get(mode, SHORT_S)
            results[mode] = known if known.mode == mode else find_plan(problem, mode, limit_s, seed)
        except ConfigError as error:
            results[mode] = str(error)
    return results


def limits_of(mode: str, time_limit_s: float) -> dict[str, float]:
    """Seconds that each mode with a limit has in a comparison: the one that was asked for all its time, the others
    SHORT_S of it at most."""
    return {each: time_limit_s if each == mode else min(time_limit_s, SHORT_S) for each in ("search", "mcmc")}


def made_plan(config: RunConfig, problem: Problem) -> ExecutionPlan:
    """The plan that is searched, or the heuristic's; it fits memory."""
    try:
        if config.plan in SEARCHED:
            limit_s, seed = config.planning.time_limit_s, config.seed
            return run_in_thread(lambda off: find_plan(problem, "search", limit_s, seed, called_off=off)).plan
        plan = balanced(heuristic_plan(problem), problem).plan
        problem.refuse(plan)
        return plan
    except ConfigError as error:
        raise PlanError(f"{error}{devices_assumed(config, problem)}") from error


def devices_assumed(config: RunConfig, problem: Problem) -> str:
    """Which devices a plan that does not fit has assumed, if the configuration names none."""
    if config.planning.device is not None:
        return ""
    name = problem.model.classes.profile(0).name
    return f" The plan assumes this machine's devices, {name}; planning.device names others."


# --- the number of ranks ---


class Ranks(NamedTuple):
    """A configuration with a number of ranks and a decided `dtype`, and what it then asks of the planner."""

    config: RunConfig
    hardware: Hardware
    problem: Problem

    @property
    def number(self) -> int:
        return self.config.cluster.n_devices

    @property
    def measured(self) -> bool:
        """Whether there is a measured profile of every model."""
        model = self.problem.model
        shapes = {role.shape for role in model.models.values()}
        return all(shapes <= profiles.keys() for profiles in model.measured)

    def __str__(self) -> str:
        """As in `2 ranks of 1 thread`."""
        threads = threads_of_ranks(self.number)
        return f"{self.number} rank{'s' * (self.number > 1)} of {threads} thread{'s' * (threads > 1)}"


def rank_counts(config: RunConfig) -> list[int]:
    """Numbers of ranks per host that a run may have, the preferred one first.

    If `cluster.devices_per_host` is a number: that number and, with `plan: auto`, its smaller divisors. If it is
    `auto`: the number of `ranks_here`, then all powers of two up to the cores, upwards; only one rank if the devices
    are elsewhere or the plan is written by hand. There is only the first number if ranks are not CPU slots of this
    machine.
    """
    cluster, stated = config.cluster, config.cluster.devices_per_host
    is_here = cluster.address is None and cluster.n_hosts == 1
    on_cpus = is_here and not gpus_here()
    if stated != "auto":
        fewer = range(stated - 1, 0, -1) if on_cpus and config.plan in SEARCHED else ()
        return [stated, *(number for number in fewer if stated % number == 0)]
    if not is_here or config.planning.device is not None or config.plan not in MADE_PLANS:
        return [1]
    first = ranks_here()
    others = [2**n for n in range(cores_here().bit_length())] if on_cpus else []
    return [first, *(number for number in others if number != first)]


def decided(config: RunConfig) -> RunConfig:
    """A configuration with the number of ranks that is to be preferred."""
    return on_ranks(config, rank_counts(config)[0])


def on_ranks(config: RunConfig, number: int) -> RunConfig:
    """A configuration with another number of ranks of a host."""
    return config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"devices_per_host": number})}
    )


def rank_choices(
    config: RunConfig,
    prompt_tokens: Iterable[int] | None = None,
    profile: Path | None = None,
    kept: int | None = None,
) -> list[Ranks]:
    """The numbers of ranks to plan with, the preferred one first.

    Another number follows if both it and the first have measured profiles. If the first has none and nobody stated
    it, smaller numbers follow, for a model that does not fit the first.

    prompt_tokens, profile  as `problem_of` takes them
    kept                    number of ranks of the plan that a run has already; then there is no other choice
    Raises ConfigError as `problem_of` does.
    """
    tokens = None if prompt_tokens is None else tuple(prompt_tokens)

    def of(number: int) -> Ranks:
        chosen = on_ranks(config, number)
        hardware = hardware_of(chosen)
        chosen = typed(chosen, hardware.classes)
        return Ranks(chosen, hardware, problem_of(chosen, hardware, profile, tokens))

    (first, *others), is_stated = rank_counts(config), config.cluster.devices_per_host != "auto"
    if kept is not None:
        return [of(first if is_stated and kept not in others else kept)]
    choices = [of(first)]
    if not choices[0].measured:
        return [*choices, *(of(number) for number in others if not is_stated and number < first)]
    for number in others:
        try:
            choice = of(number)
        except ConfigError:  # the file of profiles has none of so many ranks
            continue
        if choice.measured:
            choices.append(choice)
    return choices


def fastest(
    choices: list[Ranks], plan: Callable[[Ranks], T], plan_of: Callable[[T], ExecutionPlan]
) -> tuple[Ranks, T, str | None]:
    """(number of ranks, its plan, a sentence where it is not the first one): the one with the fastest plan; where
    there are no measured profiles, the first that has a plan.

    plan  finds the plan of a number of ranks; plan_of: the plan in its result
    Figures of earlier runs count only if all numbers have some: otherwise those without would look faster.
    Raises ConfigError, of the first number, where none has a plan.
    """
    if len(choices) == 1:
        return choices[0], plan(choices[0]), None
    planned: list[tuple[Ranks, T]] = []
    fault: Exception | None = None
    for choice in choices:
        try:
            planned.append((choice, plan(choice)))
        except ConfigError as error:
            fault = fault or error
        else:
            if not choice.measured:
                break
    if not planned:
        assert fault is not None, "without a plan there is a fault"
        raise fault
    all_ran = all(choice.problem.model.history for choice, _ in planned)

    def time_s(choice: Ranks, made: T) -> float:
        model = choice.problem.model
        return price_plan(plan_of(made), model if all_ran else model.without_history()).iteration_time_s

    seconds = [time_s(choice, made) for choice, made in planned]
    least_s = min(seconds)
    best, made = planned[seconds.index(least_s)]
    if best is choices[0]:
        return best, made, None
    others = ", ".join(
        f"{time:.4g} s on {choice}"
        for time, (choice, _) in zip(seconds, planned, strict=True)
        if choice is not best
    )
    why = (
        f"{least_s:.4g} s an iteration, against {others}" if others else f"there is no plan for {choices[0]}"
    )
    return best, made, f"the run takes {best}: {why}."


def users_seconds(config: RunConfig, plan: ExecutionPlan, held_out_rows: int) -> dict[str, float]:
    """Node that calls Python rewards, services or environments, or draws with another engine -> seconds that these
    may take there, until they are late by deadlines of their own.

    held_out_rows  rows that an evaluation answers; it judges them batch by batch
    A call judges, or answers, one batch on each head, all at the same time.
    """
    answers = evaluation_of(config)
    seconds: dict[str, float] = {}
    play_s = longest_play_s(config) + longest_agents_s(config) if isinstance(config, Scores) else 0.0
    other_s = longest_wait_s(config) if isinstance(config, Samples) else 0.0
    for node in plan.nodes:
        match node:
            case CallNode(call=call):
                gives = {call.remap.get(key, key) for key in call.outputs}
                if isinstance(config, Scores) and config.scoring_rewards and "scores" in gives:
                    seconds[node.name] = longest_s(config)
                elif (play_s or other_s) and call.kind == "generate" and call.role != JUDGE:
                    seconds[node.name] = play_s + other_s
            case EvaluateNode() if answers is not None:
                batches = -(-held_out_rows // rows_at_once(config))
                judged_s = longest_s(answers) if answers.rewards else 0.0
                seconds[node.name] = batches * (judged_s + play_s) + other_s
            case _:
                pass
    return seconds
