"""The command line and algorithms of other packages: they are found, and what is wrong with them is one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.flows.checked_files import refused
from tests.rlhf_tasks.algorithms.registered import FILES, RECORD, install, installed

TUNED = {"tuned": "tuned:ALGORITHM"}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def tuned(document, tmp_path, tmp_path_factory):
    """Install a package with some files; the document is a run of its algorithm, on rows to complete."""
    place = tmp_path_factory.mktemp("site")
    document["type"] = "tuned"
    for name in ("sampling", "rewards"):
        del document[name]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc", "completion": "d"}\n')

    def make(**files):
        install(place, "tuned-models", TUNED, {**FILES, **files})
        return place

    return make


def test_its_run_is_checked_and_planned(call, tuned):
    with installed(tuned()):
        status, out, err = call("config", "validate", "FILE")
    assert status == 0, err
    assert "actor_train" in out
    assert "valid. 1 row, 2 iterations." in out


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"tuned/__init__.py": "import no_such_thing"}, "cannot be imported: ModuleNotFoundError"),
        ({"tuned/functions.py": ""}, "has the call 'actor_train' in its graph but no function of that name"),
    ],
)
@pytest.mark.parametrize("command", [("run", "tuned"), ("config", "validate"), ("plan",), ("profile",)])
def test_a_faulty_one_is_refused_by_its_packages_name(call, tuned, files, sentence, command):
    option = ("FILE",) if command[0] == "config" else ("--config", "FILE")
    with installed(tuned(**files)):
        refused(call, "of the package tuned-models", sentence, command=(*command, *option))


def test_a_data_set_without_a_key_that_the_graph_takes_is_refused(call, tuned):
    keyless = RECORD.replace("fetch=CompletionExample.values", "fetch=lambda example: {'input_ids': [1]}")
    with installed(tuned(**{"tuned/__init__.py": keyless})):
        refused(
            call,
            "of the package tuned-models takes the key 'response_mask' from the data set",
            command=("config", "validate", "FILE"),
        )


def test_a_name_that_two_have_is_refused_whatever_runs(call, tuned, document):
    place = tuned()
    install(place, "other-models", TUNED, {})
    with installed(place):
        refused(call, "tuned-models", "other-models", "'tuned'")


def test_a_faulty_one_is_refused_before_torch_or_prefect_are_loaded(document, tuned, tmp_path):
    place = tuned(**{"tuned/functions.py": "import torch"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    code = (
        "import sys; from prefect_rlhf.flows.cli import run_command; status = run_command(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers', 'prefect', 'distributed'} & sys.modules.keys())); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "tuned", "--config", str(tmp_path / "run.yaml")],
        env={**os.environ, "PYTHONPATH": f"{place}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stderr == (
        "error: the algorithm 'tuned' of the package tuned-models has the call 'actor_train' in its graph but no "
        "function of that name in tuned.functions. Fix or uninstall that package.\n"
    )


def test_another_packages_fault_is_none_of_a_run_that_does_not_need_it(call, tuned, document):
    document["type"] = "sft"
    with installed(tuned(**{"tuned/__init__.py": "import no_such_thing"})):
        status, _, err = call("config", "validate", "FILE")
    assert status == 0, err


def test_what_is_registered_is_drawn(call, tuned):
    with installed(tuned(**{"tuned/__init__.py": RECORD})):
        status, out, err = call("graph", "tuned")
    assert status == 0, err
    assert "actor_train" in out
