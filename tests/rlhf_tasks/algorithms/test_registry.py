"""The records: ours, and those that other packages register."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from prefect_rlhf.planner.text import algorithm_graph
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, make_config
from prefect_rlhf.rlhf_tasks.algorithms.functions import load_functions
from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, algorithm_names
from prefect_rlhf.rlhf_tasks.user_code.errors import UserCodeError
from tests.rlhf_tasks.algorithms.registered import FILES, RECORD, install, installed

SIZES = SimpleNamespace(
    batch_size=12,
    group_size=2,
    num_mini_batches=3,
    scoring_role="reward",
    on_reward_error="stop",
    scores_tokens=False,
    roles=lambda: ("actor", "critic", "ref", "reward", "teacher"),
    records_kept=False,
    truncated_responses="keep",
    beta=0.1,
    mask_truncated_completions=False,
    max_rounds=1,
)
LEARNT_FROM_ROWS = ("sft", "reward_model", "dpo", "kto")


@pytest.mark.parametrize("name", algorithm_names())
def test_sizes_come_from_the_configuration(name):
    group_size = 1 if name in LEARNT_FROM_ROWS else 2
    calls = algorithm(name).graph(SimpleNamespace(**{**vars(SIZES), "group_size": group_size}))
    assert {call.n_seqs for call in calls} == {12}
    assert all(call.mini_batches == (3 if call.kind == "train_step" else 1) for call in calls)
    assert {call.group_size for call in calls} == {group_size}


def test_a_preset_is_the_algorithm_with_other_defaults():
    grpo, dapo = algorithm("grpo"), algorithm("dapo")
    assert (dapo.name, dapo.functions) == ("dapo", grpo.functions)
    document = {
        "models": {"actor": "m"},
        "data": {"train": "d"},
        "sampling": {"max_completion_length": 8},
        "rewards": [{"function": "m:f"}],
        "total_iterations": 1,
    }
    plain, config = make_config({"type": "grpo", **document}), make_config({"type": "dapo", **document})
    changed = {"type": "dapo", "loss_type": "dapo", "epsilon_high": 0.28}
    changed |= {"overlong_buffer": 0.2, "filter_groups": 2}
    assert config.model_dump() == {**plain.model_dump(), **changed}
    assert isinstance(config, grpo.config)
    assert make_config(config.model_dump(mode="json")) == config
    assert make_config({"type": "dapo", **document, "epsilon_high": 0.5}).epsilon_high == 0.5
    with pytest.raises(ConfigError, match="epsilon_high: input should be greater than 0, found -1"):
        make_config({"type": "dapo", **document, "epsilon_high": -1})


def test_presets_have_the_figures_of_their_papers():
    defaults = {
        name: {field: algorithm(name).config.model_fields[field].default for field in fields}
        for name, fields in {
            "dr_grpo": ("loss_type", "scale_rewards", "beta"),
            "gspo": ("importance_sampling_level", "epsilon", "epsilon_high", "beta"),
            "cispo": ("loss_type", "epsilon_high"),
        }.items()
    }
    assert defaults == {
        "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0},
        "gspo": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.0},
        "cispo": {"loss_type": "cispo", "epsilon_high": 4.0},
    }


def test_ppo_without_a_reward_model_scores_on_another_role():
    calls = algorithm("ppo").graph(SimpleNamespace(**{**vars(SIZES), "scoring_role": "ref"}))
    assert next(call for call in calls if call.name == "reward_inference").role == "ref"


def test_graphs_load_no_torch():
    heavy = ("torch", "prefect", "distributed")
    code = (
        "import sys; from prefect_rlhf.rlhf_tasks.algorithms.registry import algorithm, algorithm_names;"
        f"[algorithm(name) for name in algorithm_names()]; sys.exit(any(m in sys.modules for m in {heavy}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_algorithm_of_ours_has_a_function_for_each_call():
    for name in algorithm_names():
        record = algorithm(name)
        calls = [call.name for call in record.calls(record.nominal())]
        assert all(map(callable, load_functions(record, calls).values())), name


def test_an_algorithm_that_would_learn_from_skipped_samples_is_refused():
    grpo = algorithm("grpo")

    def blind(config):
        *before, train = grpo.graph(config)
        seen = tuple(key for key in train.inputs if key != "stays")
        return [*before, train.model_copy(update={"inputs": seen})]

    config = grpo.nominal().model_copy(update={"on_reward_error": "skip"})
    assert "stays" in grpo.calls(config)[-1].inputs
    sentence = (
        r"^on_reward_error: skip is not for the algorithm 'grpo' .*: its call 'actor_train' does not read"
    )
    with pytest.raises(ConfigError, match=sentence):
        replace(grpo, graph=blind).calls(config)


TUNED = {"tuned": "tuned:ALGORITHM"}
DOCUMENT = {"type": "tuned", "models": {"actor": "m"}, "data": {"train": "d"}, "total_iterations": 1}


@pytest.fixture
def tuned(tmp_path):
    """Install a package and have it found."""
    found = []

    def make(entries=TUNED, package="tuned-models", **files):
        install(tmp_path, package, entries, {**FILES, **files})
        if not found:
            found.append(installed(tmp_path))
            found[0].__enter__()

    yield make
    for context in found:
        context.__exit__(None, None, None)


def test_an_algorithm_of_another_package_is_one_among_the_others(tuned):
    tuned()
    assert algorithm_names()[:3] == ["ppo", "grpo", "sft"]
    assert "tuned" in algorithm_names()
    record = algorithm("tuned")
    assert (record.name, record.package) == ("tuned", "tuned-models")
    config = make_config(DOCUMENT)
    assert type(config) is record.config
    assert [call.name for call in record.calls(config)] == ["actor_train"]
    with pytest.raises(ConfigError, match=r"must be one of ppo, .*, tuned, found 'tunes'"):
        make_config({**DOCUMENT, "type": "tunes"})


def test_names_are_listed_and_others_run_without_importing_a_package(tuned):
    tuned(**{"tuned/__init__.py": "raise RuntimeError('imported')"})
    assert "tuned" in algorithm_names()
    assert algorithm("ppo").package == "prefect-rlhf"
    with pytest.raises(ConfigError, match="imported"):
        algorithm("tuned")


@pytest.mark.parametrize(
    ("init", "sentence"),
    [
        ("import no_such_thing", "cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("ALGORITM = 1", "cannot be imported: AttributeError"),
        ("def f(:", "cannot be imported: SyntaxError: invalid syntax"),
        ("ALGORITHM = 1", "is not an Algorithm but of type int"),
        (RECORD.replace("config=TunedConfig", "config=int"), "a configuration that is not a RunConfig"),
        (RECORD.replace("config=TunedConfig", "config=SFTConfig"), "has configurations of type 'sft'"),
        (
            "from prefect_rlhf.rlhf_tasks.config.training import TrainingConfig"
            + RECORD.replace("(SFTConfig)", "(TrainingConfig)"),
            "a configuration without the field 'models'",
        ),
    ],
)
def test_a_package_without_a_sound_record_is_named(tuned, init, sentence):
    tuned(**{"tuned/__init__.py": init})
    with pytest.raises(ConfigError) as refused:
        make_config(DOCUMENT)
    said = str(refused.value)
    assert said.startswith("the algorithm 'tuned' of the package tuned-models ")
    assert sentence in said
    assert said.endswith("Fix or uninstall that package.")
    assert "\n" not in said


def test_two_algorithms_of_one_name_are_named_with_their_packages(tuned):
    tuned()
    tuned(package="other-models")
    with pytest.raises(
        ConfigError, match=r"packages (tuned|other)-models and (tuned|other)-models both .*'tuned'"
    ):
        algorithm_names()


def test_a_name_of_ours_is_taken(tuned):
    tuned({"ppo": "tuned:ALGORITHM"})
    with pytest.raises(
        ConfigError, match=r"packages prefect-rlhf and tuned-models both have .* called 'ppo'"
    ):
        make_config(DOCUMENT)


def test_a_name_that_no_command_could_say_is_refused(tuned):
    tuned({"fine-tuned": "tuned:ALGORITHM"})
    with pytest.raises(
        ConfigError, match="the package tuned-models registers an algorithm called 'fine-tuned'"
    ):
        algorithm_names()


@pytest.mark.parametrize(
    ("functions", "sentence"),
    [
        (
            "import torch\ndef actor_trains(): ...",
            "the call 'actor_train' in its graph but no function of that name",
        ),
        ("def f(:", "which is not valid Python"),
        (None, "its functions in tuned.other, but there is no such module"),
    ],
)
def test_a_graph_with_a_call_that_has_no_function_is_named(tuned, functions, sentence):
    if functions is None:
        tuned(**{"tuned/__init__.py": RECORD.replace("tuned.functions", "tuned.other")})
    else:
        tuned(**{"tuned/functions.py": functions})
    with pytest.raises(ConfigError) as refused:
        algorithm("tuned").calls(make_config(DOCUMENT))
    assert str(refused.value).startswith("the algorithm 'tuned' of the package tuned-models has ")
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "source", ["from tuned.more import *", "if True:\n    from tuned.more import actor_train"]
)
def test_a_function_may_come_from_elsewhere(tuned, source):
    tuned(**{"tuned/functions.py": source})
    assert algorithm("tuned").calls(make_config(DOCUMENT))


def test_functions_that_cannot_be_imported_end_a_run_as_code_of_the_users(tuned):
    tuned(**{"tuned/functions.py": "import no_such_thing\ndef actor_train(): ..."})
    record = algorithm("tuned")
    with pytest.raises(UserCodeError, match=r"'tuned' of the package tuned-models .*: .*no_such_thing"):
        load_functions(record, [call.name for call in record.calls(make_config(DOCUMENT))])


def test_a_graph_that_needs_a_configuration_to_be_drawn_says_so(tuned):
    tuned(**{"tuned/__init__.py": RECORD.replace("graph=graph", "graph=lambda config: config.unheard_of")})
    with pytest.raises(
        ConfigError, match=r"graph of 'tuned' cannot be drawn without a configuration: .*unheard_of"
    ):
        algorithm_graph("tuned")


GRPO = """
from typing import Literal
from prefect_rlhf.rlhf_tasks.algorithms.grpo import ALGORITHM as OURS
from prefect_rlhf.rlhf_tasks.algorithms.grpo import GRPOConfig
from dataclasses import replace

class TunedConfig(GRPOConfig):
    type: Literal["tuned"] = "tuned"

ALGORITHM = replace(OURS, config=TunedConfig, functions="tuned.functions")
"""
GRPO_FUNCTIONS = "from prefect_rlhf.rlhf_tasks.algorithms.grpo.functions import"
REST = f"{GRPO_FUNCTIONS} actor_inference, actor_train, reward_inference\n"


@pytest.mark.parametrize(
    ("functions", "segment", "refused"),
    [
        ("from prefect_rlhf.rlhf_tasks.algorithms.grpo.functions import actor_generate", 4, False),
        ("from prefect_rlhf.rlhf_tasks.algorithms.grpo.functions import *", 4, False),
        ("def actor_generate(engine, batch, context): ...", None, False),
        ("def actor_generate(engine, batch, context): ...", 4, True),
        ("from tuned.more import actor_generate", 4, True),
    ],
)
def test_only_our_own_generation_draws_in_segments(tuned, functions, segment, refused):
    tuned(**{"tuned/__init__.py": GRPO, "tuned/functions.py": f"{REST}{functions}\n"})
    sampling = {"max_completion_length": 8, "segment_tokens": segment}
    config = make_config(
        {
            "type": "tuned",
            "models": {"actor": "a"},
            "data": {"train": "d"},
            "sampling": sampling,
            "rewards": [{"function": "m:f"}],
            "total_iterations": 1,
        }
    )
    if not refused:
        assert next(call.segment_tokens for call in algorithm("tuned").calls(config)) == segment
        return
    with pytest.raises(ConfigError) as told:
        algorithm("tuned").calls(config)
    assert str(told.value) == (
        "sampling.segment_tokens=4: the algorithm 'tuned' of the package tuned-models draws by a function "
        "'actor_generate' of its own, which knows no segments. Leave it out."
    )
