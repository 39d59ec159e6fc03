"""What is planned for: cluster, figures of its devices, lengths, profiles, as `prefect-rlhf plan` takes them."""

import json
from typing import Any

import pytest

from prefect_rlhf.flows.cli import run_command
from prefect_rlhf.flows.run import prepare as prepare_module
from prefect_rlhf.flows.run.planning import hardware_of, problem_of, typed, users_seconds, workload_of
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.planner.plan.mesh import Cluster
from prefect_rlhf.planner.plan.workload import Thinking
from prefect_rlhf.planner.pricing.figures import cache_file, write_profiles
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.algorithms.held_out import rows_at_once
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.algorithms.sft import SFTConfig
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.spec import CallAssignment
from prefect_rlhf.rlhf_tasks.user_code.process import ENDING_S, MOST_LOST
from tests.flows.checked_files import model_folder
from tests.flows.plan_documents import DISJOINT, LLAMA, SHAPE, measured, ppo, refused
from tests.tiny_judge import judged
from tests.tiny_runs import ppo_config

KEYS = ("prompt", "chosen", "rejected")

pytestmark = pytest.mark.timeout(1800)  # the first to evaluate plans compiles that


@pytest.fixture
def planned(run_plan, tmp_path):
    """Plan a configuration, in a mode; gives (figures, standard output, errors)."""

    def plan(document, *arguments, mode="heuristic"):
        file = tmp_path / "figures.json"
        given = ("--mode", mode, "--no-compare", "--json", str(file), *arguments)
        status, out, err = run_plan(document, *given)
        assert status == 0, err
        return json.loads(file.read_text()), out, err

    return plan


def test_rewards_in_python_are_no_forward_pass(planned):
    times = []
    for planning in ({}, {"reward_seconds_per_sequence": 0.25}):
        document = ppo(
            models={"actor": LLAMA},
            rewards=[{"function": "score.py:score"}],
            planning={"prompt_tokens": 16, "device": "cpu-slot", **planning},
        )
        given = planned(document, mode="symmetric")[0]["assignments"]["reward_inference"]
        times.append((given["time_s"], given["dp"]))
    (dispatch_s, _), (time_s, dp) = times
    assert dispatch_s == 5e-3
    assert time_s == pytest.approx(dispatch_s + 8 / dp * 0.25)


def test_the_head_and_micro_batches_are_planned_for_as_the_engine_computes_them():
    """Of 16 + 4 or 16 tokens, the head computes those that are generated; of rows with completions it may be all."""
    answers = PPOConfig.model_validate(
        ppo(
            planning={"prompt_tokens": 16, "new_tokens": {4: 0.5, 16: 0.5}},
            micro_batch_tokens=64,
            gradient_checkpointing="selective",
        )
    )
    workload = workload_of(answers)
    assert (workload.counted_tokens, workload.counted_share) == (10, 10 / 26)
    assert workload.micro_batch_tokens == 64
    assert workload.recompute == "selective"
    rows = ppo(type="sft", models={"actor": LLAMA})
    del rows["sampling"]
    assert workload_of(SFTConfig.model_validate(rows)).counted_share == 1


def test_of_prompts_of_several_lengths_the_cache_has_room_for_the_longest():
    config = PPOConfig.model_validate(ppo(planning={"new_tokens": {4: 0.5, 16: 0.5}}))
    several, alike = (workload_of(config, tokens) for tokens in ([10, 10, 40], [20, 20]))
    room = config.sampling.max_completion_length
    assert (several.prompt_tokens, several.cache_tokens) == (20, 40 + room)
    assert (alike.prompt_tokens, alike.cache_tokens) == (20, 20 + room)


def test_what_the_answers_of_a_pair_share_is_planned_for_once(tmp_path):
    """Of rows `ab` + `cd` or `ef`, and `abcdef` + `gh` or `ij`, 2 and 6 tokens are shared."""
    data = tmp_path / "pairs.jsonl"
    rows = [("ab", "cd", "ef"), ("abcdef", "gh", "ij")]
    data.write_text("".join(json.dumps(dict(zip(KEYS, row, strict=True))) + "\n" for row in rows))
    document = {
        "type": "dpo",
        "output_dir": str(tmp_path / "run"),
        "models": {"actor": str(model_folder(tmp_path / "model"))},
        "data": {"train": str(data)},
        "batch_size": 2,
        "total_iterations": 1,
        "dtype": "float32",
    }
    workload = workload_of(make_config(document))
    assert (workload.answers, workload.shared_tokens) == (2, 4.0)
    stated = workload_of(make_config({**document, "planning": {"prompt_tokens": 16}}))
    assert (stated.answers, stated.shared_tokens) == (2, 0.0)


@pytest.mark.parametrize(
    ("sampling", "how"), [({}, (0, 0)), ({"top_k": 5}, (1, 0)), ({"top_p": 0.9}, (0, 1))]
)
def test_how_tokens_are_drawn_is_planned_for(sampling, how):
    document = ppo(planning={"prompt_tokens": 16})
    document["sampling"] |= sampling
    workload = workload_of(PPOConfig.model_validate(document))
    assert (workload.top_k, workload.top_p) == how


def test_turns_are_planned_for_where_an_environment_answers():
    played = {"factory": "builtin:GuessingGame", "max_turns": 3, "max_turn_tokens": 8}
    planning = {"prompt_tokens": 16, "new_tokens": {4: 0.5, 16: 0.5}, "environment_seconds_per_turn": 0.5}
    alone, answered = (
        workload_of(PPOConfig.model_validate(ppo(planning=planning, environment=environment)))
        for environment in (None, played)
    )
    assert alone.thinking is None
    assert answered.thinking == Thinking(mean_s=1.0, longest_s=1.0), "two turns of half a second"


@pytest.mark.parametrize("agent", [None, {"command": "agent"}])
def test_a_cache_without_shared_prompts_is_planned_for_where_agents_ask(agent):
    config = PPOConfig.model_validate(ppo(planning={"prompt_tokens": 16}, agent=agent))
    assert workload_of(config).agents == (agent is not None)


@pytest.mark.parametrize(
    ("together", "engine", "waits"),
    [(True, "builtin", True), (False, "builtin", False), (False, "vllm", True)],
)
def test_all_wait_for_all_by_choice_or_where_another_engine_draws(together, engine, waits):
    played = {"factory": "builtin:GuessingGame", "together": together}
    document = ppo(planning={"prompt_tokens": 16}, environment=played, generation={"engine": engine})
    thinking = workload_of(PPOConfig.model_validate(document)).thinking
    assert thinking is not None
    assert thinking.together is waits


INF = float("inf")


@pytest.mark.parametrize(
    ("cluster", "parts"),
    [
        ({"n_hosts": 0}, ("n_hosts", "greater than 0", "0")),
        ({"devices_per_host": -2}, ("devices_per_host", "-2")),
        ({"device": "h9000"}, ("'h9000'", "a100-80g-sxm", "h100-sxm", "cpu-slot")),
        ({"device": {"like": "h100-sxm", "memory_bytes": 0}}, ("memory_bytes", "greater than 0")),
        (
            {"device": {"like": "h100-sxm", "flops": 1e15}},
            ("flops: unknown key, did you mean 'flops_per_s'?",),
        ),
        ({"device": {"name": "mine"}}, ("flops_per_s: required",)),
        ({"between_hosts": {"bytes_per_s": -1}}, ("between_hosts.bytes_per_s", "-1")),
        ({"between_hosts": {"bytes_per_s": INF}}, ("between_hosts.bytes_per_s", "finite", "inf")),
        ({"inside_host": {"latency_s": INF}}, ("inside_host.latency_s", "finite", "inf")),
        ({"device": {"like": "h100-sxm", "flops_per_s": INF}}, ("flops_per_s", "finite", "inf")),
        ({"device": {"like": "h100-sxm", "memory_bytes": INF}}, ("memory_bytes", "finite", "inf")),
        (
            {"device": [{"n_hosts": 1, "device": {"like": "cpu-slot", "dispatch_s": INF}}]},
            ("device.0.device: dispatch_s", "finite", "inf"),
        ),
        ({"n_hosts": 10**8}, ("n_hosts", "less than or equal to 131072", "100000000")),
        (
            {"device": [{"n_hosts": 10**12, "device": "cpu-slot"}]},
            ("device.0.n_hosts", "131072", "1000000000000"),
        ),
        (
            {"device": None},
            ("device: give a preset's name (a100", "by hosts [{n_hosts, device}]", "found None"),
        ),
        ({"device": 5}, ("device: give a preset's name", "{like: PRESET", "found 5")),
        (
            {"device": [{"n_hosts": 1, "device": None}]},
            ("device.0.device: give a preset's name", "{like: PRESET", "found None"),
        ),
        ({"between_hosts": {"bandwidth": 1}}, ("between_hosts.bandwidth: unknown key",)),
        ({"hosts": 3}, ("hosts: unknown key, did you mean 'n_hosts'?",)),
        ({"device": []}, ("device", "n_hosts=1", "given for 0 hosts")),
        ({"device": [{"n_hosts": 2, "device": "cpu-slot"}]}, ("device: n_hosts=1", "given for 2 hosts")),
        ({"device": [{"n_hosts": 0, "device": "cpu-slot"}]}, ("device.0.n_hosts", "greater than 0")),
        ({"device": [{"n_hosts": 1, "device": "h9000"}]}, ("device.0.device", "'h9000'", "cpu-slot")),
        ({"device": [{"hosts": 1, "device": "cpu-slot"}]}, ("device.0.n_hosts: required",)),
        (
            {"device": [{"n_hosts": 1, "device": {"like": "cpu-slot", "flops_per_s": 0}}]},
            ("device.0.device: flops_per_s", "greater than or equal to 1"),
        ),
        (
            {
                "n_hosts": 2,
                "device": [
                    {"n_hosts": 1, "device": "cpu-slot"},
                    {"n_hosts": 1, "device": {"like": "cpu-slot", "memory_bytes": 1e9}},
                ],
            },
            ("both named 'cpu-slot'", "name of its own"),
        ),
        ("n_hosts: 1\n  devices: [", ("file.yaml:2: not valid YAML",)),
    ],
)
def test_a_faulty_cluster_file_is_refused(run_plan, write, cluster, parts):
    sound = {"n_hosts": 1, "devices_per_host": 2, "device": "cpu-slot"}
    document = cluster if isinstance(cluster, str) else {**sound, **cluster}
    refused(run_plan(ppo(), "--cluster", write(document)), *parts)


TWO_CLASSES = {
    "n_hosts": 2,
    "devices_per_host": 2,
    "device": [
        {"n_hosts": 1, "device": {"like": "cpu-slot", "name": "slow", "flops_per_s": 1e10}},
        {"n_hosts": 1, "device": "cpu-slot"},
    ],
}


def test_the_classes_of_devices_are_named(run_plan, write, tmp_path):
    figures = tmp_path / "figures.json"
    part = dict.fromkeys(DISJOINT, "0-3 d4")
    plan = write({**part, "actor_generate": "2", "ref_inference": "0"}, "plan.yaml")
    cluster = write(TWO_CLASSES, "cluster.yaml")
    status, out, err = run_plan(
        ppo(), "--cluster", cluster, "--evaluate", plan, "--no-compare", "--json", str(figures)
    )
    assert status == 0, err
    assert "2x2 (hosts 0 slow, 1 cpu-slot)" in out
    row = next(line for line in out.splitlines() if line.lstrip().startswith("critic_inference"))
    assert "slow + cpu-slot" in row
    assert "priced by its slowest" in " ".join(out.split())
    found = json.loads(figures.read_text())
    assert {name: part["nodes"] for name, part in found["device_classes"].items()} == {
        "slow": [0],
        "cpu-slot": [1],
    }
    of = {name: given["device_classes"] for name, given in found["assignments"].items()}
    assert of["actor_generate"] == ["cpu-slot"]
    assert of["ref_inference"] == ["slow"]
    assert of["critic_train"] == ["cpu-slot", "slow"]


@pytest.mark.whole
def test_classes_of_devices_may_stand_in_the_configuration(planned, run_plan):
    times = []
    for device in ("cpu-slot", {"cpu-slot": 1, "h100-sxm": 1}):
        document = ppo(
            planning={"prompt_tokens": 16, "device": device}, cluster={"n_hosts": 2, "devices_per_host": 2}
        )
        times.append(planned(document, "--time-limit", "2", mode="search")[0]["iteration_time_s"])
    assert times[1] < times[0]
    both = [{"n_hosts": 1, "device": "cpu-slot"}]
    status, _, err = run_plan(ppo(planning={"prompt_tokens": 16, "device": both}), "--time-limit", "2")
    assert status == 2
    assert "planning.device: give a device, or {device: number of hosts}, found [" in err


def test_a_figure_in_the_wrong_unit_is_warned_about(planned, write):
    cluster = {"n_hosts": 1, "devices_per_host": 2, "device": "cpu-slot"}
    slow, sound = ({**cluster, "between_hosts": {"bytes_per_s": rate}} for rate in (25, "2.5e9"))
    _, _, err = planned(ppo(), "--cluster", write(slow))
    assert err.startswith("warning: ")
    assert "between_hosts.bytes_per_s=25 is implausible" in err
    assert planned(ppo(), "--cluster", write(sound))[2] == ""


MEANT_IN_OTHER_UNITS = {
    "like": "a100-80g-sxm",
    "flops_per_s": 312,
    "between_hosts": {"bytes_per_s": 200e9, "latency_s": 15},
}


@pytest.mark.parametrize("place", ["configuration", "configuration by hosts", "cluster file"])
def test_figures_are_judged_wherever_a_device_is_stated(planned, write, place):
    """A sentence for each, with the value, where it stands, and the unit that was likely meant."""
    stated = write(MEANT_IN_OTHER_UNITS, "mine.yaml")
    device = stated if place == "configuration" else {stated: 1}
    cluster = {"n_hosts": 1, "devices_per_host": 2, "device": MEANT_IN_OTHER_UNITS}
    given = (
        (ppo(), "--cluster", write(cluster, "mine.yaml"))
        if place == "cluster file"
        else (ppo(planning={"prompt_tokens": 16, "device": device}),)
    )
    lines = planned(*given)[2].splitlines()
    assert len(lines) == 3
    wrong = (("flops_per_s=312", "3.12e+14"), ("bytes_per_s=2e+11", "2.5e+10"), ("latency_s=15", "1.5e-05"))
    for line, (value, meant) in zip(lines, wrong, strict=True):
        assert line.startswith("warning: ")
        assert "mine.yaml: " in line
        assert value in line
        assert f"write {meant}" in line


def test_a_run_is_warned_too(tmp_path, capsys, write):
    model_folder(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n')
    model = str(tmp_path / "model")
    document = ppo(
        models={"actor": model, "reward": model},
        data={"train": str(tmp_path / "prompts.jsonl")},
        planning={"device": write({**MEANT_IN_OTHER_UNITS, "memory_bytes": 80e9}, "mine.yaml")},
    )
    assert run_command(["config", "validate", write(document, "run.yaml")]) == 0
    assert capsys.readouterr().err.count("is implausible") == 3


def test_a_cluster_file_takes_the_place_of_the_configurations_cluster(planned, write):
    cluster = write("n_hosts: 1\ndevices_per_host: 4\ndevice: {like: cpu-slot, memory_bytes: 8e9}\n")
    figures, _, _ = planned(ppo(), "--cluster", cluster)
    assert figures["peak_memory_bytes"].keys() == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"planning": {"prompt_tokens": 0}}, ("planning.prompt_tokens", "greater than 0")),
        ({"planning": {}}, ("models.actor is an inline config", "planning.prompt_tokens")),
        ({"planning": {"prompt_tokens": 16, "new_tokens": 99}}, ("99 tokens", "max_completion_length is 16")),
        ({"planning": {"prompt_tokens": 16, "new_tokens": {8: 0.5, 16: 0.4}}}, ("add up to 0.9",)),
        ({"planning": {"prompt_tokens": 16, "new_tokens": "many"}}, ("planning.new_tokens", "'many'")),
        ({"planning": {"prompt_tokens": 250}}, ("250 tokens", "16 more", "256 positions", "'actor'")),
        ({"planning": {"prompt_tokens": 16, "device": "tpu"}}, ("'tpu'", "cpu-slot")),
        ({"cluster": {"n_hosts": 10**8}}, ("cluster.n_hosts", "less than or equal to 131072", "100000000")),
        ({"planning": {"prompt_tokens": 16, "device": "my.yaml"}}, ("my.yaml: no such file",)),
        (
            {"planning": {"prompt_tokens": 16, "device": {"cpu-slot": 3}}},
            ("planning.device: n_hosts=1", "given for 3 hosts"),
        ),
        (
            {"planning": {"prompt_tokens": 16, "device": {"cpu-slot": 0}}},
            ("planning.device.cpu-slot", "greater than 0"),
        ),
        (
            {"planning": {"prompt_tokens": 16, "device": {"tpu": 1}}},
            ("'tpu'", "cpu-slot"),
        ),
        ({"models": {"actor": {"model_type": "bert"}, "reward": "x"}}, ("actor", "bert")),
        ({"models": {"actor": LLAMA, "reward": "x"}}, ("role 'critic'", "is not there")),
        (
            {"models": {"actor": {"config": LLAMA}, "reward": "x"}},
            ("models.actor: a model's", "{model_type: "),
        ),
        ({"models": {"actor": {**LLAMA, "hidden_size": -1}, "reward": "x"}}, ("hidden_size=-1",)),
    ],
)
def test_what_cannot_be_planned_is_refused(run_plan, change, parts):
    refused(run_plan(ppo(**change), "--mode", "heuristic"), *parts)


def test_the_plan_tells_what_is_kept_of_the_memory(planned):
    figures, out, _ = planned(ppo(planning={"prompt_tokens": 16, "device": "h100-sxm"}))
    kept = "context 1 GB, communicators 6.9 GB, fragmentation 2.4 GB"
    assert f"Of the 80 GB of a h100-sxm tensors do not have {kept}." in out
    (device,) = figures["device_classes"].values()
    assert device["reserved_bytes"] == {"context": 1e9, "communicators": 6.9e9, "fragmentation": 2.4e9}


def test_a_dtype_that_the_device_lacks_is_refused(run_plan, write):
    old = write("like: a100-40g-sxm\nname: v100\nhas_bfloat16: false\n", "mine.yaml")

    def run(dtype):
        document = ppo(planning={"prompt_tokens": 16, "device": old}, dtype=dtype)
        return run_plan(document, "--mode", "heuristic", "--no-compare")

    refused(run("bfloat16"), "dtype=bfloat16", "a v100 does not compute in it", "dtype=float32")
    assert run("float32")[0] == 0


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu-slot", "float32"),
        ("a100-40g-sxm", "bfloat16"),
        ("v100", "float32"),
        ("one without a figure for CUDA's context", "bfloat16"),
        (["a100-40g-sxm", "cpu-slot"], "float32"),
    ],
)
def test_a_run_without_a_dtype_takes_bfloat16_on_gpus_that_multiply_it(write, device, expected):
    files = {
        "v100": "like: a100-40g-sxm\nname: v100\nhas_bfloat16: false\n",
        "one without a figure for CUDA's context": "like: a100-40g-sxm\nname: mine\ncontext_bytes: 0\n",
    }
    named = write(files[device], "mine.yaml") if isinstance(device, str) and device in files else device
    parts = named if isinstance(named, str) else dict.fromkeys(named, 1)
    cluster = {"n_hosts": 1 if isinstance(named, str) else 2, "devices_per_host": 2}
    document = {**ppo(planning={"prompt_tokens": 16, "device": parts}, cluster=cluster)}
    del document["dtype"]
    config = make_config(document)
    assert config.dtype == "auto"
    hardware = hardware_of(config)
    assert typed(config, hardware.classes).dtype == expected
    assert problem_of(config, hardware).model.workload.itemsize == {"float32": 4, "bfloat16": 2}[expected]
    stated = make_config({**document, "dtype": "float64"})
    assert typed(stated, hardware.classes).dtype == "float64", "what is stated stands"


@pytest.mark.parametrize(
    "figure", ["flops_per_s", "memory_bytes", "host_copy_bytes_per_s", "layer_overhead_s"]
)
def test_a_device_file_with_an_infinite_figure_is_refused(run_plan, write, figure):
    device = write(f"like: cpu-slot\n{figure}: .inf\n", "mine.yaml")
    outcome = run_plan(ppo(planning={"prompt_tokens": 16, "device": device}), "--mode", "heuristic")
    refused(outcome, f"mine.yaml: {figure}: ", "finite", "inf")


def test_models_that_no_device_holds_are_refused_with_device_and_bytes(run_plan):
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    models = {"actor": large, "reward": large}
    refused(run_plan(ppo(models=models), "--mode", "heuristic"), " bytes", "would lower it")


def test_lengths_come_from_the_data_where_they_are_not_given(planned, tmp_path):
    model_folder(tmp_path / "model")
    rows = [{"prompt": "a" * 20}, {"prompt": "a" * 10}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = ppo(
        models={"actor": str(tmp_path / "model"), "reward": str(tmp_path / "model")},
        data={"train": str(tmp_path / "prompts.jsonl")},
        planning={},
    )
    times = [
        planned(document, *arguments)[0]["iteration_time_s"]
        for arguments in ((), ("planning.prompt_tokens=15",), ("planning.prompt_tokens=20",))
    ]
    assert times[0] == times[1]
    assert times[0] < times[2]


def test_it_is_said_whether_figures_were_measured(planned, tmp_path):
    elsewhere = tmp_path / "measured.json"
    write_profiles([measured()], elsewhere)
    slot = ppo(planning={"prompt_tokens": 16, "device": "cpu-slot"})
    for arguments, source in (
        ((), "preset of cpu-slot"),
        (("--profile", str(elsewhere)), "measured profile of cpu-slot"),
    ):
        figures, out, err = planned(slot, *arguments)
        assert (figures["source"], err) == (source, "")
        assert f"Priced by: {source}.\n" in out


def test_a_run_far_beyond_its_profile_is_warned_about(planned, tmp_path):
    profile = tmp_path / "measured.json"
    write_profiles([measured()], profile)
    _, _, err = planned(ppo(batch_size=1024), "--profile", str(profile), mode="symmetric")
    assert err.count("\n") == 1
    assert err.startswith("warning: The measured profile of cpu-slot ends at ")
    assert "rows that decode together; actor_generate is priced at " in err


def test_a_profile_from_elsewhere_is_gone_by_as_one_measured_here_is(planned, tmp_path):
    def planned_s(*arguments):
        return planned(document, *arguments)[0]["iteration_time_s"]

    elsewhere = tmp_path / "measured.json"
    document = ppo(output_dir=str(tmp_path / "runs"))
    write_profiles([measured(slower=20)], elsewhere)
    without = planned_s()
    by_profile = planned_s("--profile", str(elsewhere))
    assert by_profile > 5 * without
    here = cache_file(tmp_path / "runs" / "profiles", "cpu-slot", Cluster(1, 2), SHAPE, 4)
    here.parent.mkdir(parents=True)
    elsewhere.rename(here)
    assert planned_s() == by_profile
    write_profiles([measured()], elsewhere)
    assert planned_s("--profile", str(elsewhere)) < by_profile, "the file goes first"


@pytest.mark.parametrize(
    ("profiles", "parts"),
    [
        ([measured(ModelShape.from_config({**LLAMA, "hidden_size": 32}))], ("another model", "hidden 32")),
        ([measured(device="h100-sxm")], ("a profile of h100-sxm; the cluster has cpu-slot", "measured.json")),
        ([measured(n_hosts=2)], ("is of 2x2 cpu-slot; the cluster has 1x2", "measured.json")),
        ([], ("measured.json has no profile",)),
        (None, ("measured.json: no such file", "Measure again")),
    ],
    ids=["model", "device", "cluster", "empty", "missing"],
)
def test_a_profile_that_does_not_fit_is_refused(run_plan, tmp_path, profiles, parts):
    path = tmp_path / "measured.json"
    if profiles is not None:
        write_profiles(profiles, path)
    refused(run_plan(ppo(), "--profile", str(path)), *parts)


def seconds(config: Any, held_out_rows: int = 0) -> dict[str, float]:
    return users_seconds(config, prepare(config).plan, held_out_rows)


def judging(tmp_path, asks=None, **changes):
    """The problem of a run with a judge, and the cost of its call on one device."""
    config = judged(tmp_path, asks=asks, planning={"device": "cpu-slot"}, **changes)
    problem = problem_of(config, hardware_of(config))
    call = problem.graph.call("judge_generate")
    assignment = CallAssignment(placement=Placement((0,), ParallelStrategy()))
    return problem, problem.model.call(call, assignment)


def test_a_judge_is_planned_for_with_questions_that_have_prompt_and_response(tmp_path):
    problem, cost = judging(tmp_path)
    work, prompts = problem.model.workload.judge, problem.model.workload
    assert work.prompt_tokens == len("||:") + prompts.prompt_tokens + 12
    assert work.longest == len("||:") + max(prompts.longest_prompt, prompts.prompt_tokens) + 12
    longer, slower = judging(tmp_path, {"max_tokens": 40})
    assert longer.model.workload.judge.new_tokens == 40
    assert slower.seconds > 5 * cost.seconds
    twice, both = judging(tmp_path, {"template": "{first}|{second}", "against": "answer"})
    assert twice.model.workload.judge.questions == 2
    assert both.seconds > cost.seconds


def test_a_judge_is_priced_as_our_engine_draws_whatever_draws_the_responses(tmp_path):
    generation = {"engine": "openai", "url": "http://127.0.0.1:1", "weights_dir": str(tmp_path)}
    (beside, of_judge), (ours, alike) = judging(tmp_path, generation=generation), judging(tmp_path)
    assert beside.model.workload.other is not None
    assert of_judge == alike
    call, alone = (
        ours.graph.call("actor_generate"),
        CallAssignment(placement=Placement((0,), ParallelStrategy())),
    )
    assert beside.model.call(call, alone).seconds > ours.model.call(call, alone).seconds, "it takes weights"


def test_a_judge_has_a_mesh_of_its_own_in_a_searched_plan(tmp_path):
    config = judged(tmp_path, plan="auto", cluster={"devices_per_host": 2}, dtype="float32")
    plan = prepare(config).plan
    (node,) = plan.calls["judge_generate"]
    assert node.placement.devices
    assert {"transfer_actor_generate_to_judge_generate"} <= {each.name for each in plan.nodes} or (
        node.placement == plan.calls["actor_generate"][0].placement
    )


@pytest.mark.parametrize(
    ("asks", "sentence"),
    [
        ({"max_tokens": 100}, r"a reply up to max_tokens=100 more exceed the 128 positions of role 'judge'"),
        ({"template": "{prompt} {nothing}"}, "names the column 'nothing', which the rows lack"),
        ({"shout": True}, "has no parameter 'shout'"),
        ({"model": "big"}, "only a service has model"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_anything_starts(tmp_path, asks, sentence):
    with pytest.raises(ConfigError, match=sentence):
        prepare(judged(tmp_path, asks=asks))


def test_a_judge_without_a_tokenizer_is_refused(tmp_path):
    config = judged(tmp_path)
    (tmp_path / "judge" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"judge: has no tokenizer\.json"):
        prepare(config)


def test_the_call_that_judges_may_take_what_its_rewards_may(tmp_path):
    assert seconds(ppo_config(tmp_path, reward_timeout_s=100)) == {"reward_inference": 100 + ENDING_S}


def test_a_reward_model_alone_has_no_such_seconds(tmp_path):
    assert seconds(ppo_config(tmp_path, rewards=[])) == {}


def test_a_process_that_is_started_anew_has_its_time_again(tmp_path):
    skips = ppo_config(tmp_path, reward_timeout_s=100, on_reward_error="skip")
    assert seconds(skips) == {"reward_inference": (1 + MOST_LOST) * (100 + ENDING_S)}


def test_an_evaluation_may_take_as_long_in_each_of_its_batches(tmp_path):
    ppo_config(tmp_path)
    asked = {"data": str(tmp_path / "prompts.jsonl"), "num_generations": 2}
    config = ppo_config(tmp_path, reward_timeout_s=50, evaluation=asked, batch_size=20)
    once = 50 + ENDING_S
    assert seconds(config, 21) == {"reward_inference": once, "evaluate_actor": 3 * once}


def test_both_of_remaxs_calls_judge(tmp_path):
    ppo = ppo_config(tmp_path).model_dump(include={"data", "output_dir", "sampling", "rewards", "batch_size"})
    document = ppo | {"type": "remax", "models": {"actor": str(tmp_path / "actor")}, "total_iterations": 1}
    assert seconds(make_config(document)).keys() == {"reward_inference", "greedy_reward_inference"}


def test_a_judge_does_not_wait_for_environments(tmp_path):
    played = {"factory": "builtin:GuessingGame", "max_turn_tokens": 4}
    waits = seconds(judged(tmp_path, environment=played))
    assert waits.keys() == {"actor_generate", "reward_inference"}


def test_another_engine_has_deadlines_of_its_own_before_that_of_its_node(tmp_path, monkeypatch):
    """vLLM may take ten minutes to start in the node that draws first; `patience` counts for both."""
    monkeypatch.setattr(prepare_module, "check_generation", lambda config, shape: None)
    vllm = ppo_config(tmp_path, rewards=[], patience=2.0, generation={"engine": "vllm"})
    assert seconds(vllm) == {"actor_generate": 2 * 600}
    server = {"engine": "openai", "url": "http://127.0.0.1:1", "weights_dir": str(tmp_path)}
    answers = {"data": str(tmp_path / "prompts.jsonl")}
    config = ppo_config(tmp_path, reward_timeout_s=50, generation=server, evaluation=answers)
    wait_s, once = 120 + 0.2 * config.sampling.max_completion_length, 50 + ENDING_S
    batches = -(-100 // rows_at_once(config))
    judged = {"reward_inference": once, "evaluate_actor": wait_s + batches * once}
    assert seconds(config, 100) == judged | {"actor_generate": wait_s}
