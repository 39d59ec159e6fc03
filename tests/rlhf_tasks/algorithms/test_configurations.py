"""Run configurations: defaults, overrides, paths, and one clear sentence for every fault."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from prefect_rlhf.rlhf_tasks.algorithms.configurations import (
    ConfigError,
    load_config,
    make_config,
    manual_assignments,
    resolve_paths,
)
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, algorithm_names
from prefect_rlhf.rlhf_tasks.algorithms.rollout import RolloutConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Scores
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.protocol.progress import Timeouts
from tests.tiny_runs import write_model

MINIMAL = """
type: ppo
models: {actor: models/actor}
data: {train: prompts.jsonl}
sampling: {max_completion_length: 8}
rewards: [{function: "rewards.py:exact"}]
total_iterations: 3
"""


def ppo(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "type": "ppo",
        "models": {"actor": "a"},
        "data": {"train": "d.jsonl"},
        "sampling": {"max_completion_length": 8},
        "rewards": [{"function": "m:f"}],
        "total_iterations": 3,
    }
    return {**document, **changes}


NEEDED = {key: value for key, value in ppo().items() if key != "type"}


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, bool]:
    """{dotted key: required} of a configuration, shared sections counted where they first occur."""
    found: dict[str, bool] = {}
    for name, field in model.model_fields.items():
        candidates = (field.annotation, *getattr(field.annotation, "__args__", ()))
        inner = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if inner is None:
            found[prefix + name] = field.is_required()
        else:
            found |= leaves(inner, f"{prefix}{name}.")
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def test_a_minimal_file_loads_with_defaults_and_absolute_paths(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(file.parent)
    assert load_config(file).models.actor == "models/actor", "no such folder: a name on a Hub"
    (file.parent / "models" / "actor").mkdir(parents=True)
    config = load_config(file)
    assert isinstance(config, PPOConfig)
    assert config.models.actor == str(file.parent / "models/actor")
    assert config.data.train == str(file.parent / "prompts.jsonl")
    assert config.rewards[0].function == f"{file.parent}/rewards.py:exact"
    assert config.rewards[0].name == "exact"
    assert config.resume == "never"
    assert manual_assignments(config) is None


def test_the_file_of_an_environment_is_found_from_any_folder(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(file.parent)
    for factory, found in (("games.py:Game", f"{file.parent}/games.py:Game"), ("games:Game", "games:Game")):
        config = load_config(file, [f"environment={{factory: {factory!r}}}"])
        assert isinstance(config, PPOConfig)
        assert config.environment is not None
        assert config.environment.factory == found


@pytest.mark.parametrize("host", [".a", "a..b", "x" * 64])
def test_a_url_of_no_host_is_refused(file: Path, host: str):
    with pytest.raises(ConfigError, match=rf"rewards\.0\.url: http://{re.escape(host)}/ names no host"):
        load_config(file, [f"rewards=[{{url: 'http://{host}/'}}]"])


def test_an_override_may_name_a_file_with_dots(file: Path):
    train, device = {"a.jsonl": 1, "more/b.jsonl": 1}, {"./x.yaml": 1}
    changes = [f"data.train={train}", "data.train.a.jsonl=2"]
    config = load_config(file, [*changes, f"planning.device={device}", "planning.device.y.yaml=3"])
    assert config.data.weights == (2, 1)
    assert config.planning.device == {
        str(Path(name).resolve()): n for name, n in (("x.yaml", 1), ("y.yaml", 3))
    }
    with pytest.raises(ConfigError, match=r"is not of the form key\.sub=value"):
        load_config(file, ["data.train.=2"])


def test_overrides_win_over_the_file(file: Path):
    config = load_config(
        file, ["optimizer.learning_rate=1e-3", "rewards.0.weight=2", "name=x", "plan={a: 0}"]
    )
    assert isinstance(config, PPOConfig)
    assert config.optimizer.learning_rate == 1e-3
    assert config.rewards[0].weight == 2.0
    assert config.name == "x"
    assignments = manual_assignments(config)
    assert assignments is not None
    assert assignments["a"].placement.strategy == ParallelStrategy(1, 1, 1)


def test_ppo_stays_small():
    asked_for = (
        "planning.",
        "evaluation.",
        "environment.",
        "agent",
        "tool",
        "correction.",
        "generation.",
    )  # sections that most runs leave out
    keys = {key: needed for key, needed in leaves(PPOConfig).items() if not key.startswith(asked_for)}
    assert len(keys) <= 99, sorted(keys)
    assert sum(keys.values()) <= 8


@pytest.mark.parametrize("kind", algorithm_names())
def test_every_field_is_described_in_a_sentence(kind: str):
    def check(model: type[BaseModel]) -> None:
        for name, field in model.model_fields.items():
            candidates = (field.annotation, *getattr(field.annotation, "__args__", ()))
            inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
            for submodel in inner:
                check(submodel)
            if name != "type" and not (inner and field.is_required()):
                assert (field.description or "").endswith("."), f"{model.__name__}.{name}"

    check(algorithm(kind).config)


def test_roles_default_to_the_actor_and_the_reward_model():
    config = make_config(ppo())
    assert {role: (r.folder, r.head, r.optimizer is not None) for role, r in config.roles().items()} == {
        "actor": ("a", "lm", True),
        "critic": ("a", "scalar", True),
        "ref": ("a", "lm", False),
    }
    assert isinstance(config, PPOConfig)
    assert config.scoring_role == "ref"
    scored = make_config(ppo(models={"actor": "a", "reward": "r"}))
    assert isinstance(scored, PPOConfig)
    assert scored.roles()["critic"].folder == "r"
    assert scored.roles()["reward"].optimizer is None
    assert scored.scoring_role == "reward"


def test_staleness_without_a_correction_is_warned_about_and_has_no_call_for_it():
    cases = (
        (0, "auto", 2, 0, 0),
        (0, "truncated", 2, 1, 0),
        (0, "masked", 1, 0, 0),
        (1, "auto", 2, 1, 0),
        (1, "auto", 1, 0, 0),
        (1, "none", 2, 0, 1),
    )
    for staleness, correction, mini_batches, calls, warned in cases:
        sizes = {"num_mini_batches": mini_batches, "batch_size": 2}
        config = make_config(ppo(staleness=staleness, correction={"kind": correction}, **sizes))
        graph = algorithm("ppo").calls(config)
        assert [call.name for call in graph].count("actor_inference") == calls
        assert {call.name: call.lead for call in graph if call.lead} == (
            {"actor_generate": 1} if staleness else {}
        )
        assert (config.warning or "").count("staleness=1 with correction.kind=none") == warned
    of_others = make_config(ppo(generation={"engine": "vllm"}, correction={"kind": "none"}))
    assert "generation.engine=vllm with correction.kind=none" in (of_others.warning or "")


@pytest.mark.parametrize(
    ("kind", "lacks"), [("sft", "generation that could run ahead"), ("rollout", "policy ratio")]
)
def test_what_cannot_sample_ahead_says_why(kind: str, lacks: str):
    document = {"type": kind, "models": {"actor": "m"}, "data": {"train": "d"}, "staleness": 1}
    with pytest.raises(ConfigError) as caught:
        make_config(document)
    said = str(caught.value)
    assert f"staleness: {kind} has no {lacks}" in said
    assert "Leave it out, or choose an algorithm that has one, such as grpo or ppo." in said


@pytest.mark.parametrize("kind", algorithm_names())
def test_no_staleness_is_what_every_algorithm_has(kind: str):
    fields = algorithm(kind).config.model_fields
    document = {key: value for key, value in NEEDED.items() if key in fields} | {"type": kind}
    if kind == "expert_iteration":
        document["min_score"] = 1.0
    if kind == "distillation":
        document["models"] = {"actor": "a", "teacher": "t"}
    if not issubclass(algorithm(kind).config, Scores):
        document.pop("rewards", None)
    wanted = make_config(document)
    assert make_config({**document, "staleness": 0}) == wanted
    assert getattr(wanted, "staleness", 0) == 0


def test_the_critic_has_its_own_optimizer_where_given():
    config = make_config(ppo(optimizer={"learning_rate": 1e-4}, critic_learning_rate=1e-3))
    rates = {r: role.optimizer.learning_rate for r, role in config.roles().items() if role.optimizer}
    assert rates == {"actor": 1e-4, "critic": 1e-3}


def test_patience_lengthens_every_wait_and_asks_for_the_same_bytes():
    usual, twice = (make_config(ppo(patience=factor)) for factor in (1, 2))
    assert twice.startup_s == 2 * usual.startup_s
    longer, limits = twice.limits, usual.limits
    for name in ("deadline_floor_s", "deadline_factor", "io_floor_s"):
        assert getattr(longer, name) == 2 * getattr(limits, name)
    ranks, usual_ranks = Timeouts.of(longer.patience), Timeouts()
    assert (ranks.entry_s, ranks.restart_s) == (2 * usual_ranks.entry_s, 2 * usual_ranks.restart_s)
    assert longer.io_floor_s * longer.io_least_bytes_per_s == limits.io_floor_s * limits.io_least_bytes_per_s


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tempratur": 1}, "tempratur: unknown key"),
        ({"path": 1}, "path: unknown key"),
        ({"": 1}, "'': unknown key"),
        ({"sampling": {"max_completion_length": 8, "temprature": 1}}, "did you mean 'temperature'?"),
        (
            {"rewards": [{"function": "m:f", "wieght": 1}]},
            "rewards.0.wieght: unknown key, did you mean 'weight'?",
        ),
        ({"batch_size": "many"}, "batch_size: input should be a valid integer"),
        ({"gamma": 1.5}, "gamma: input should be less than or equal to 1, found 1.5."),
        ({"gamma": float("nan")}, "gamma: input should be a finite number"),
        (
            {"type": "orpo"},
            "kto, reinforce_pp, remax, reward_model, rloo, rollout, found 'orpo'.",
        ),
        ({"type": None}, "type: must be one of"),
        ({"lora": {"rank": 0}}, "lora.rank: input should be greater than 0, found 0."),
        ({"lora": {"alpha": 0}}, "lora.alpha: input should be greater than 0"),
        ({"lora": {"targets": []}}, "lora.targets: "),
        ({"lora": {"dropout": 0.1}}, "lora.dropout: unknown key"),
        ({"lora": {"export": "gguf"}}, "lora.export: input should be 'adapter' or 'merged'"),
        ({"models": {}}, "models.actor: required, but not given."),
        ({"batch_size": 10, "num_mini_batches": 4}, "num_mini_batches=4 does not divide batch_size=10."),
        ({"rewards": []}, "nothing scores the responses."),
        ({"rewards": [{"function": "no_colon"}]}, "rewards.0.function: string should match pattern"),
        ({"rewards": [{"function": "a:f"}, {"function": "b:f"}]}, "two rewards share a name: f, f."),
        ({"sampling": {"max_completion_length": 8, "temperature": 0}}, "ppo must explore"),
        (
            {"sampling": {"max_completion_length": 8, "min_new_tokens": 9}},
            "sampling: min_new_tokens=9 exceeds max_completion_length=8. Lower the one",
        ),
        (
            {"sampling": {"max_completion_length": 8, "stop": ["a", "é" * 128]}},
            "sampling: the strings in stop have 257 bytes together, more than 256. Name fewer",
        ),
        (
            {"sampling": {"max_completion_length": 8, "stop": [""]}},
            "sampling.stop: give strings and ids of tokens, from 0 on, found ''.",
        ),
        (
            {"sampling": {"max_completion_length": 8, "stop": [-1]}},
            "sampling.stop: give strings and ids of tokens, from 0 on, found -1.",
        ),
        (
            {"sampling": {"max_completion_length": 8, "stop": {"a": 1}}},
            "sampling.stop: give strings and ids of",
        ),
        (
            {"rewards": [{"function": "m:f", "headers": {"a": "b"}}]},
            "rewards.0: headers has no meaning for function=m:f. Leave it out.",
        ),
        (
            {"rewards": [{"url": "http://a", "kwargs": {"a": "b"}}]},
            "rewards.0: kwargs has no meaning for url=http://a. Leave it out.",
        ),
        ({"rewards": [{}]}, "rewards.0: give either function or url, found neither."),
        (
            {"rewards": [{"function": "m:f", "url": "http://a"}]},
            "rewards.0: give either function or url, found bot",
        ),
        ({"dual_clip": 1.0}, "dual_clip: input should be greater than 1, found 1.0."),
        (
            {"truncated_responses": "drop"},
            "truncated_responses: input should be 'keep', 'zero' or 'bootstrap'",
        ),
        ({"critic_warmup_iterations": 3}, "critic_warmup_iterations=3 leaves no iteration for the actor"),
        (
            {"plan": {"actor_train": "0-1 d3"}, "cluster": {"devices_per_host": 2}},
            "plan.actor_train: strategy dp=3 tp=1 pp=1 needs 3 devices; the mesh has 2",
        ),
        (
            {"plan": {"actor_train": "4"}},
            "plan.actor_train names devices [4]; the cluster has 0 to 0.",
        ),
        (
            {"plan": {"actor_train": "hosts 0,2"}, "cluster": {"n_hosts": 2}},
            "plan.actor_train names hosts [2]; the cluster has 0 to 1. Choose other hosts",
        ),
        (
            {"plan": {"actor_train": "hosts 0 t4"}, "cluster": {"devices_per_host": 2}},
            "plan.actor_train: strategy dp=1 tp=4 pp=1 needs 4 devices; the mesh has 2",
        ),
    ],
)
def test_each_fault_is_one_sentence_naming_the_field(changes: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as caught:
        make_config(ppo(**changes))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_generations": 1}, "num_generations: input should be greater than or equal to 2, found 1."),
        (
            {"type": "rloo", "num_generations": 1},
            "num_generations: input should be greater than or equal to 2",
        ),
        (
            {"num_generations": 3},
            "num_generations=3 does not divide batch_size=16. Make batch_size a multiple",
        ),
        (
            {"num_generations": 4, "num_mini_batches": 8},
            "num_mini_batches=8 cuts batch_size=16 into mini-batches of 2 samples, which split groups of "
            "num_generations=4. Choose a num_mini_batches that divides batch_size / num_generations = 4.",
        ),
        ({"sampling": {"max_completion_length": 8, "temperature": 0}}, "grpo must explore"),
        (
            {"staleness": 3},
            "staleness=3 draws all responses of total_iterations=3 with the initial weights. Choose a smaller",
        ),
        ({"staleness": 17}, "staleness: input should be less than or equal to 16, found 17."),
        ({"correction": {"upper": 0}}, "correction.upper: input should be greater than 0, found 0."),
        (
            {"correction": {"upper": 3}},
            "correction weights the tokens that another policy has drawn, but with staleness=0",
        ),
        ({"correction": {"lower": 3}}, "lower=3 is above upper=2. Exchange them."),
        ({"importance_cap": 3.0}, "importance_cap: unknown key: here it is correction.upper."),
        ({"importance_cap": None}, "importance_cap: unknown key: here it is correction.kind: none."),
        (
            {"vllm_importance_sampling_correction": False},
            "vllm_importance_sampling_correction: unknown key: here it is correction.kind: none.",
        ),
        ({"correction": {"veto": 1.5}}, "correction.veto: input should be less than 1, found 1.5."),
        (
            {"staleness": 1, "filter_groups": 2},
            "staleness=1 samples ahead of scoring, but filter_groups=2 waits for the scores of each round",
        ),
        (
            {"type": "expert_iteration", "min_score": 1.0, "staleness": 1},
            "staleness: expert_iteration has no policy ratio that could correct for older weights. Leave it out",
        ),
        (
            {"sampling": {"max_completion_length": 8, "segment_tokens": 8}},
            "segment_tokens=8 cuts no response of max_completion_length=8. Lower it or leave it out.",
        ),
        (
            {"sampling": {"max_completion_length": 8, "segment_tokens": 0}},
            "sampling.segment_tokens: input should be greater than 0, found 0.",
        ),
        (
            {
                "type": "expert_iteration",
                "min_score": 1.0,
                "sampling": {"max_completion_length": 8, "segment_tokens": 4},
            },
            "sampling.segment_tokens=4: type=expert_iteration has no policy ratio that could",
        ),
        (
            {
                "sampling": {"max_completion_length": 8, "segment_tokens": 4},
                "environment": {"factory": "builtin:GuessingGame"},
            },
            "segment_tokens=4 and environment.max_turn_tokens=None: of responses of several turns a segment is a",
        ),
        ({"delta": 1.1}, "delta=1.1 must exceed the ratio's upper bound 1 + 0.2."),
        (
            {"type": "cispo", "delta": 9.0},
            "delta=9 bounds a clipped ratio, which loss_type=cispo does not have.",
        ),
        (
            {"type": "reinforce_pp", "baseline": "group"},
            "baseline=group compares the samples of a prompt, but num_generations=1.",
        ),
        ({"type": "expert_iteration"}, "every response would be learned, whatever its score. Give min_score"),
        (
            {"type": "expert_iteration", "best_of_group": True, "num_generations": 1},
            "best_of_group=true compares the samples of a prompt, but num_generations=1.",
        ),
    ],
)
def test_groups_that_cannot_be_compared_are_refused(changes: dict[str, Any], sentence: str):
    document = {"type": "grpo", "batch_size": 16, **NEEDED}
    with pytest.raises(ConfigError) as caught:
        make_config({**document, **changes})
    assert sentence in str(caught.value)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_reference_is_loaded_only_where_its_kl_divergence_counts(beta: float):
    config = make_config({"type": "grpo", "beta": beta, **NEEDED})
    assert ("ref" in config.roles()) == (beta > 0)
    assert ("ref_inference" in [call.name for call in algorithm("grpo").calls(config)]) == (beta > 0)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("gamma", "is not of the form key.sub=value"),
        ("=1", "is not of the form key.sub=value"),
        ("gamma.x=1", "gamma: input should be"),
        ("rewards.5.weight=1", "rewards has no item '5'"),
        ("type.x=1", "type is a value, not a mapping"),
        ("gamma=[", "override 'gamma=[': not valid YAML: expected the node"),
    ],
)
def test_faulty_overrides_are_named(file: Path, override: str, sentence: str):
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"type: ppo\ntype: sft\n", ":2: not valid YAML: key 'type' stands twice"),
        (b"a: [1\nb: 2\n", "not valid YAML"),
        (b"- 1\n", "expected a mapping of keys to values, found list"),
        (b"", "expected a mapping of keys to values, found NoneType"),
        (
            b"\xff\xfe\x00",
            "not valid YAML: not UTF-8 (invalid start byte at byte 0)",
        ),
        (b"!!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_faulty_files_are_named(tmp_path: Path, content: bytes, sentence: str):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)


@pytest.mark.timeout(60)
def test_a_file_of_aliases_of_aliases_is_refused_at_once(tmp_path: Path):
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    text = "\n".join(["a0: &a0 [x, x]", *levels, "batch_size: *a8", "type: sft", "total_iterations: 1"])
    (tmp_path / "bomb.yaml").write_text(text + "\ndata: {train: x}\nmodels: {actor: x}\n")
    with pytest.raises(ConfigError, match=r"bomb\.yaml:4: not valid YAML: more than 24 aliases"):
        load_config(tmp_path / "bomb.yaml")


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file\."):
        load_config(tmp_path / "nowhere.yaml")


def test_a_plan_file_is_read_and_its_faults_named(tmp_path: Path):
    good = tmp_path / "plan.yaml"
    good.write_text("actor_train: 0-1 t2 m2\n")
    assignments = manual_assignments(make_config(ppo(plan=str(good))))
    assert assignments is not None
    assert assignments["actor_train"].micro_batches == 2
    good.write_text("actor_train: hosts 1-2 d2 t4\n")
    config = make_config(ppo(plan=str(good), cluster={"n_hosts": 3, "devices_per_host": 4}))
    assignments = manual_assignments(config)
    assert assignments is not None
    assert assignments["actor_train"].placement.devices == tuple(range(4, 12))
    with pytest.raises(
        ConfigError, match=r"plan\.yaml: actor_train: strategy dp=2 tp=4 pp=1 needs 8 devices"
    ):
        manual_assignments(make_config(ppo(plan=str(good), cluster={"n_hosts": 3})))
    bad = tmp_path / "bad.yaml"
    bad.write_text("actor_train: 0-1 t4\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml: actor_train: strategy dp=1 tp=4 pp=1 needs 4 devices"):
        manual_assignments(make_config(ppo(plan=str(bad))))


def test_configurations_are_frozen_and_survive_json():
    config = make_config(ppo(plan={"a": "0"}))
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert PPOConfig.model_validate_json(config.model_dump_json()) == config


def test_resolving_paths_twice_changes_nothing(tmp_path: Path):
    config = resolve_paths(make_config(ppo(resume="runs/x", plan="p.yaml")), tmp_path)
    assert config.resume == str(tmp_path / "runs/x")
    assert config.plan == str(tmp_path / "p.yaml")
    assert resolve_paths(config, Path("/elsewhere")) == config


def test_rollouts_hold_whole_prompts():
    document = {
        "type": "rollout",
        "models": {"actor": "a"},
        "data": {"train": "d"},
        "sampling": {"max_completion_length": 4},
    }
    assert isinstance(make_config({**document, "batch_size": 8, "num_generations": 4}), RolloutConfig)
    with pytest.raises(ConfigError, match="num_generations=3 does not divide batch_size=8"):
        make_config({**document, "batch_size": 8, "num_generations": 3})


def test_loading_needs_neither_torch_nor_prefect(file: Path):
    code = f"""
import sys
from prefect_rlhf.rlhf_tasks.algorithms.configurations import load_config
load_config({str(file)!r})
assert not {{"torch", "transformers", "prefect", "distributed"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3], timeout=200)


def test_a_single_snapshot_is_refused_there_would_be_none_to_go_back_to():
    with pytest.raises(ConfigError, match=r"keep_last.* 2"):
        make_config(ppo(keep_last=1))


def test_commits_come_as_often_as_they_are_worth_unless_a_number_is_given():
    assert make_config(ppo()).snapshot_every == "auto"
    assert [make_config(ppo(snapshot_every=every)).snapshot_every for every in ("auto", 1, "5")] == [
        "auto",
        1,
        5,
    ]


@pytest.mark.parametrize("every", [0, -1, 2.5, 10**10, "often", "", True, [1], "1" * 5000])
def test_another_cadence_is_refused_in_one_sentence(every):
    with pytest.raises(ConfigError) as refused:
        make_config(ppo(snapshot_every=every))
    told = str(refused.value)
    assert told.startswith(
        "snapshot_every: give auto, or a time such as 600s, or iterations from 1 to 1000000000, found "
    )
    assert len(told) < 300
    assert "\n" not in told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"snapshot_every": "0s"},
            "snapshot_every: give auto, or a time such as 600s, or iterations from 1 to 1000000000, found '0s'.",
        ),
        (
            {"patience": 0},
            "patience: input should be greater than or equal to 0.05, found 0.",
        ),
    ],
)
def test_a_run_without_patience_is_refused(changes, told):
    with pytest.raises(ConfigError) as refused:
        make_config(ppo(**changes))
    assert str(refused.value) == told


def test_a_snapshot_that_may_be_the_best_is_made_whatever_it_costs():
    def every(**evaluation):
        return make_config(ppo(evaluation={"data": "held.jsonl", "every": 2, **evaluation})).evaluated_every

    assert (every(), every(keep_best=1)) == (None, 2)
    assert make_config(ppo()).evaluated_every is None


@pytest.mark.parametrize("kind", ["grpo", "dapo", "rloo", "remax", "reinforce_pp"])
def test_a_reference_that_nothing_reads_is_refused(kind: str):
    document = {**NEEDED, "type": kind, "models": {"actor": "a", "ref": "r"}}
    with pytest.raises(
        ConfigError, match=r"models\.ref=r is named, but beta=0 uses no reference\. Leave it out"
    ):
        make_config({**document, "beta": 0})
    assert make_config({**document, "beta": 0.1}).roles()["ref"].folder == "r"


def test_the_order_of_what_ends_a_response_makes_no_other_run():
    def stops(strings: list[str], ids: list[int]) -> Any:
        sampling = {"max_completion_length": 8, "stop": [*strings, *ids]}
        return make_config(ppo(sampling=sampling))

    assert stops(["b", "a"], [7, 3, 7]) == stops(["a", "b"], [3, 7])


def test_the_order_of_lora_targets_makes_no_other_adapter(tmp_path: Path):
    shape = read_shape(write_model(tmp_path / "model"))
    names = ["v_proj", "q_proj", "v_proj", "up_proj"]
    configs = [
        make_config({"type": "ppo", **NEEDED, "lora": {"targets": targets}})
        for targets in (names, names[::-1])
    ]
    assert configs[0] == configs[1]
    adapters = configs[0].adapters_of("actor", shape)
    assert adapters is not None
    assert adapters.targets == ("q_proj", "up_proj", "v_proj")
