"""The command line: every mistake of a user ends in one sentence and status 2, before anything is started."""

import errno
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from urllib.request import proxy_bypass

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_rlhf.flows.cli import COMMANDS, CONFIG_COMMANDS, direct_to_loopback, run_command
from prefect_rlhf.flows.demo import DATA, write_model_folder
from prefect_rlhf.flows.run.run_folder import new_run_folder, taken
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from tests.flows.checked_files import PLACE, refused
from tests.ppo_calls import PPO_CALLS


def test_a_sound_configuration_is_validated_and_its_plan_printed(call, tmp_path):
    status, out, err = call("config", "validate", "FILE")
    assert status == 0, err
    assert all(name in out for name in PPO_CALLS)
    assert "valid. 2 rows, 2 iterations." in out
    assert not (tmp_path / "runs").exists()


def test_the_version_is_the_packages(call):
    status, out, _ = call("--version")
    assert (status, out.strip()) == (0, version("prefect-rlhf"))


def test_rows_that_are_skipped_are_counted_in_a_sentence(call, document, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "abc"}\n{"prompt": "abd"}\n{"question": "?"}\n')
    document["data"] |= {"train": str(bad), "on_bad_row": "skip"}
    status, out, err = call("config", "validate", "FILE")
    assert status == 0, err
    assert "1 row is skipped, listed in skipped-rows.jsonl of the run folder." in out + err


def test_an_override_is_part_of_the_configuration(call):
    status, out, _ = call("config", "show", "FILE", "kl_coef=0.5", "optimizer.learning_rate=1e-3")
    shown = yaml.safe_load(out)
    assert status == 0
    assert shown["kl_coef"] == 0.5
    assert shown["optimizer"]["learning_rate"] == 1e-3
    assert shown["optimizer"]["adam_betas"] == [0.9, 0.95]


@pytest.mark.parametrize(
    "kind", ["ppo", "grpo", "dr-grpo", "reinforce-pp", "remax", "sft", "reward-model", "rollout"]
)
def test_every_type_has_a_schema_and_a_graph(call, kind):
    status, out, _ = call("config", "schema", kind)
    assert status == 0
    assert json.loads(out)["properties"]["data"]
    status, out, _ = call("graph", kind, "--as", "mermaid")
    assert status == 0
    assert out.startswith("flowchart TD")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"kl_coeff": 0.1}, ("kl_coeff: unknown key, did you mean 'kl_coef'?",)),
        ({"batch_size": "many"}, ("batch_size: ", "integer", "'many'")),
        ({"gamma": 1.5}, ("gamma: ", "less than or equal to 1", "1.5")),
        (
            {"plan": {"actor_train": "0 d2"}},
            ("plan.actor_train", "dp=2 tp=1 pp=1", "2 devices", "1"),
        ),
        (
            {"plan": {"actor_train": "1-2 d2"}},
            ("plan.actor_train names devices [2]", "0 to 1"),
        ),
        (
            {"batch_size": 2, "plan": dict.fromkeys(PPO_CALLS, "0-1 d2")},
            ("2 ", "2 mini-batches"),
        ),
        ({"plan": {"actor_train": PLACE}}, ("actor_generate",)),
        ({"type": "orpo"}, ("type: must be one of ppo", "'orpo'")),
        ({"type": "dr-grpo"}, ("type: 'dr-grpo' is written 'dr_grpo' in a file",)),
        ({"type": "pipeline"}, ("type: a pipeline is no single run", "`prefect-rlhf run pipeline`")),
        ({"num_mini_batches": 3}, ("num_mini_batches=3 does not divide batch_size=8",)),
        ({"name": "../x"}, ("name: ", "'../x'")),
    ],
)
def test_a_faulty_configuration_is_refused(call, document, change, parts):
    document |= change
    refused(call, *parts)


def test_the_faults_of_a_configuration_are_lines_below_each_other(call, document):
    document |= {"learning_rate": 1e-5, "gamma": 1.5}
    assert call("config", "validate", "FILE") == (
        2,
        "",
        "error: gamma: input should be less than or equal to 1, found 1.5.\n"
        "       learning_rate: unknown key: here it is optimizer.learning_rate.\n",
    )


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ("2", ("actor_train", "[2]", "devices 0 to 1")),
        ("0-1 t4", ("actor_train", "tp=4", "4 devices", "2")),
        ("hosts 1 d2", ("actor_train", "[2, 3]", "devices 0 to 1")),
        ("hosts 0 d3", ("actor_train", "dp=3", "3 devices", "2")),
    ],
)
def test_a_faulty_plan_file_is_refused(call, document, tmp_path, place, parts):
    plan = {**dict.fromkeys(PPO_CALLS, PLACE), "actor_train": place}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    refused(call, *parts, command=("run", "ppo", "--config", "FILE", f"plan={tmp_path / 'plan.yaml'}"))


@pytest.mark.parametrize("command", [("run", "ppo", "--config", "FILE"), ("config", "validate", "FILE")])
def test_a_device_that_is_not_known_is_refused(call, document, command):
    document["planning"] = {"device": "zx"}
    refused(call, "planning.device: There is no device preset 'zx'; known are", command=command)


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["run", "ppo", "--config"], ["graph", "orpo"], ["demo", "--seed", "x"]]
)
def test_a_malformed_command_line_has_status_2(arguments, capsys):
    assert run_command(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_demo_without_its_extra_is_refused(call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as if it were not installed
    folder = str(tmp_path / "demo")
    refused(call, "pip install 'prefect-rlhf[demo]'", command=("demo", "--folder", folder))
    ran = []
    monkeypatch.setattr(
        "prefect_rlhf.flows.commands.local_run.demo_here", lambda *arguments: ran.append(arguments)
    )
    write_model_folder(
        tmp_path / "demo" / DATA / "base"
    )  # its data have been made: nothing else needs the extra
    assert call("demo", "--folder", folder)[0] == 0
    assert ran == [(tmp_path / "demo", 0)]


@pytest.mark.parametrize("seed", ["-1", "1.5"])
def test_a_demo_of_no_seed_is_refused_and_begins_no_folder(call, tmp_path, seed):
    command = ("demo", "--folder", str(tmp_path / "demo"), "--seed", seed)
    refused(call, f"--seed {seed}: ", "a whole number from 0", command=command)
    assert not (tmp_path / "demo").exists()


def test_help_describes_every_command(capsys):
    for group, commands in (((), COMMANDS), (("config",), CONFIG_COMMANDS)):
        assert run_command([*group, "--help"]) == 0
        listed = {
            words[0]: words[1:]
            for line in capsys.readouterr().out.splitlines()
            if (words := line.strip("│ ").split())
        }
        for name in commands:
            assert len(listed[name]) > 3, f"{name} is not described"
            assert run_command([*group, name, "--help"]) == 0
            shown = capsys.readouterr().out
            assert "RST" not in shown
            assert " ".join(listed[name][:3]) in " ".join(shown.split())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"models": {"actor": "HuggingFaceTB/SmolLM2-135M"}},
            "not all of the model HuggingFaceTB/SmolLM2-135M is in",
        ),
        ({"models": {"actor": "gpt2"}}, "A model on the Hugging Face Hub is named ORG/NAME."),
        ({"data": {"train": "trl-lib/tldr"}}, "not all of the data set trl-lib/tldr is in"),
    ],
)
def test_a_name_on_the_hub_that_is_not_here_says_what_to_do_offline(
    call, document, tmp_path, monkeypatch, change, told
):
    monkeypatch.chdir(tmp_path)
    document |= change
    refused(call, told)


def test_a_path_that_is_not_there_is_not_taken_for_a_name_on_the_hub(call, document, tmp_path):
    document["models"] = {"actor": str(tmp_path / "no" / "model")}
    _, _, err = call("config", "validate", "FILE")
    assert "Name a Hugging Face model folder." in err
    assert "hf download" not in err


def test_many_ranks_on_few_cores_are_warned_of(call, document):
    document |= {"cluster": {"devices_per_host": 64}, "batch_size": 64, "num_mini_batches": 1}
    document["plan"] = dict.fromkeys(PPO_CALLS, "0")
    status, _, err = call("config", "validate", "FILE")
    assert status == 0, err
    assert "warning: 64 ranks" in " ".join(err.split())


def test_a_run_that_the_disk_has_no_room_for_is_refused(call, document):
    document |= {"keep_last": 10**9, "total_iterations": 10**9}
    refused(call, "bytes and its disk has", "free: 1000000001 commits of", "lower keep_last")


def test_a_dead_server_of_the_users_is_one_sentence_and_leaves_nothing(call):
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        refused(
            call,
            "PREFECT_API_URL=http://127.0.0.1:9/api: no Prefect server answers there",
            "Connection refused",
            command=("run", "ppo", "--config", "FILE"),
        )


def test_a_ui_of_no_run_is_refused(call, tmp_path):
    refused(call, f"{tmp_path} is not the folder of a run", command=("ui", str(tmp_path)))
    refused(call, "nowhere is not the folder of a run", command=("ui", str(tmp_path / "nowhere")))
    (tmp_path / "config.json").write_text("{}")
    refused(call, "reported to PREFECT_API_URL", command=("ui", str(tmp_path)))


def test_a_run_that_goes_on_is_not_resumed_a_second_time(call, document, monkeypatch):
    folder = new_run_folder(make_config(document))
    monkeypatch.setattr(
        "prefect_rlhf.flows.run.run_identity.prepare", lambda *_: pytest.fail("it is refused at first")
    )
    with taken(folder):
        refused(call, "is in use by a run in progress", command=("run", "ppo", "--resume", str(folder)))


def test_a_run_that_is_resumed_has_its_folder_from_the_first_look_on(call, document, monkeypatch):
    folder = new_run_folder(make_config(document))
    with taken(folder):
        pass  # its files are there now

    def another_one(*_):
        with taken(folder):
            pytest.fail("two have it")

    monkeypatch.setattr("prefect_rlhf.flows.run.run_identity.prepare", another_one)
    said = f"is in use by a run in progress (process {os.getpid()})."
    refused(call, said, command=("run", "ppo", "--resume", str(folder)))


LONG = "x" * 300  # longer than a name may be
FAULTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a null character in output_dir": (
        ("config", "validate", "FILE", 'output_dir="a\\0b"'),
        ("output_dir='a", "null"),
    ),
    "in models": (("config", "validate", "FILE", 'models.actor="a\\0b"'), ("models.actor='a", "null")),
    "in data": (("run", "ppo", "--config", "FILE", 'data.train="a\\0b"'), ("data.train='a", "null")),
    "in resume": (("run", "ppo", "--config", "FILE", 'resume="a\\0b"'), ("resume='a", "null")),
    "in plan": (("plan", "--config", "FILE", 'plan="a\\0b"'), ("plan='a", "null")),
    "in a reward": (
        ("run", "ppo", "--config", "FILE", 'rewards.0.function="a\\0b.py:f"'),
        ("rewards", "null"),
    ),
    "in a pipeline": (
        ("run", "pipeline", "--config", "STAGES", 'output_dir="a\\0b"'),
        ("stage 'a': output_dir=", "null"),
    ),
    "a long name of data": (
        ("config", "validate", "FILE", f"data.train={LONG}"),
        (LONG, "File name too long"),
    ),
    "of a model": (("run", "ppo", "--config", "FILE", f"models.actor={LONG}"), (LONG, "File name too long")),
    "of a run to continue with": (("run", "ppo", "--resume", LONG), (LONG, "File name too long")),
    "of a folder of runs": (
        ("run", "ppo", "--config", "FILE", f"output_dir={LONG}"),
        ("output_dir=", "too long"),
    ),
    "of the ui's run": (("ui", LONG), (LONG, "File name too long")),
    "of the run of an export": (("export", LONG, "out"), (LONG, "File name too long")),
    "of the run of a lineage": (("lineage", LONG), (LONG, "File name too long")),
    "of the run of a report": (("report", LONG), (LONG, "File name too long")),
    "of a model to begin with": (("init", "--model", LONG), (LONG, "File name too long")),
    "of a model to talk to": (("chat", LONG), (LONG, "File name too long")),
    "of a model that completes": (("generate", LONG, "--prompt", "x"), (LONG, "File name too long")),
    "of a run to pause": (("pause", LONG), (LONG, "File name too long")),
    "of a run to continue": (("resume", LONG), (LONG, "File name too long")),
    "of a run to stop": (("stop", LONG), (LONG, "File name too long")),
    "of a run to cancel": (("cancel", LONG), (LONG, "File name too long")),
    "of rows for an environment": (("rows", "FILE", LONG), (LONG, "File name too long")),
    "of a dump to replay": (("replay", LONG), (LONG, "File name too long")),
    "of a demo": (("demo", "--folder", LONG), (LONG, "File name too long")),
    "of a plan's file": (("plan", "--config", "FILE", "--out", LONG), (LONG, "File name too long")),
    "of a rehearsal's file": (("rehearse", "--config", "FILE", "--json", LONG), (LONG, "File name too long")),
    "of a model to examine": (("doctor", "--model", LONG), (LONG, "File name too long")),
    "an output file below a file": (
        ("profile", "--config", "FILE", "--analytic", "--out", "FILE/x"),
        ("x cannot be written", "existing folder"),
    ),
    "an output folder that is a file": (
        ("profile", "--config", "FILE", "--analytic", "output_dir=FILE"),
        ("output_dir=", "Not a directory"),
    ),
    "a folder of a demo below a link that leads nowhere": (
        ("demo", "--folder", "LINK/demo"),
        ("--folder=", "No such file or directory"),
    ),
    "a folder of runs that is such a link": (
        ("run", "ppo", "--config", "FILE", "output_dir=LINK"),
        ("output_dir=", "No such file or directory"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_operating_system_refuses_is_one_sentence_of_every_command(call, tmp_path, fault):
    command, parts = FAULTS[fault]
    (tmp_path / "run.yaml").touch()  # `refused` compares what is there
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    stage = {"type": "sft", "models": {"actor": "m"}, "data": {"train": "d.jsonl"}, "total_iterations": 1}
    stages = {"type": "pipeline", "name": "p", "stages": [{"name": "a", **stage}]}
    (tmp_path / "stages.yaml").write_text(yaml.safe_dump(stages))
    places = {"LINK": str(tmp_path / "link"), "STAGES": str(tmp_path / "stages.yaml")}
    for name, place in places.items():
        command = tuple(part.replace(name, place) for part in command)
    refused(call, *parts, command=command)


def test_every_command_that_takes_a_path_is_in_the_table_of_faults():
    asked = {command[0] for command, _ in FAULTS.values()}
    assert asked == {*COMMANDS, "config"} - {"graph", "setup"}  # which take none


def test_a_folder_that_an_export_cannot_write_is_refused_before_any_commit_is_read(call, document, tmp_path):
    run_folder, link = new_run_folder(make_config(document)), tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    (tmp_path / "run.yaml").touch()
    targets = {
        link: "already exists. Remove it",
        link / "out": "FOLDER=",
        tmp_path / "run.yaml" / "out": "cannot be written to: Not a directory. Name another folder.",
        tmp_path / LONG: "File name too long",
    }
    for target, words in targets.items():
        refused(call, words, command=("export", str(run_folder), str(target)))


def limited(shell: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python after some lines of bash."""
    return subprocess.run(
        ["bash", "-c", f'{shell}; exec "$@"', "bash", sys.executable, *command],
        capture_output=True,
        text=True,
    )


def test_a_run_in_a_folder_that_cannot_be_written_is_not_resumed(document, tmp_path):
    folder = new_run_folder(make_config(document))
    if os.geteuid():
        shell = f"chmod 555 {folder}"
    else:  # root writes anywhere but on a file system that is read-only
        shell = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder} || exit 99"
        shell = f'[ $UNSHARED ] || UNSHARED=1 exec unshare -m bash -c \'{shell}; exec "$@"\' bash "$@"'
    ended = limited(shell, "-m", "prefect_rlhf.flows.cli", "run", "ppo", "--resume", str(folder))
    if ended.returncode == 99 or ended.stderr.startswith("unshare"):
        pytest.skip("this account may mount nothing")
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(f"error: {folder} cannot be written to: ")
    assert ended.stderr.endswith("copy the folder (cp -r) and name the copy.\n")


def test_a_limit_of_open_files_that_is_too_low_is_a_sentence_with_the_number_that_is_needed(
    document, tmp_path
):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    ended = limited(
        "ulimit -n 64", "-m", "prefect_rlhf.flows.cli", "run", "ppo", "--config", str(tmp_path / "run.yaml")
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr == (
        "error: this process may open 64 files, and a run of 2 ranks needs 160. Raise the limit, for example by "
        "`ulimit -n 4096` as root, or use fewer ranks.\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_fault_of_the_system_that_names_no_path_is_a_sentence(monkeypatch, call):
    def full(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("prefect_rlhf.flows.commands.configs.load_config", full)
    refused(
        call,
        "the operating system refused what was asked: Too many open files.",
        command=("config", "show", "FILE"),
    )


def test_a_command_in_a_folder_that_was_removed_says_so(call, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert call("config", "show", "FILE")[2] == (
        "error: the folder that this command runs in is not there any more. Change to another one.\n"
    )


def test_output_that_nobody_reads_ends_the_command_in_silence():
    command = f"{sys.executable} -m prefect_rlhf.flows.cli config schema ppo | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_an_error_of_ours_is_not_taken_for_the_users(monkeypatch, call):
    def broken(config):
        raise ValueError("a bug")

    monkeypatch.setattr(
        "prefect_rlhf.flows.commands.configs.load_config", lambda *arguments: broken(arguments)
    )
    with pytest.raises(ValueError, match="a bug"):
        call("config", "show", "FILE")


@pytest.mark.whole
def test_a_faulty_run_is_refused_as_a_process_before_prefect_or_torch_are_loaded(document, tmp_path):
    document["kl_coef"] = -1
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    code = (
        "import sys; from prefect_rlhf.flows.cli import run_command; status = run_command(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers', 'prefect', 'distributed'} & sys.modules.keys())); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "run", "ppo", "--config", str(tmp_path / "run.yaml")]
    for change, sentence in (("kl_coef=-1", "kl_coef"), ("kl_coef=0", "")):
        done = subprocess.run(
            [*command, change, "rewards.0.function=no_module:f"], capture_output=True, text=True
        )
        assert done.returncode == 2, done.stderr
        assert done.stdout.splitlines()[-1] == "[]"
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_console_entry_point_gives_the_status_to_the_shell(tmp_path):
    command = [sys.executable, "-m", "prefect_rlhf.flows.cli"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert helped.returncode == 0
    assert all(name in helped.stdout for name in ("config", "demo", "export", "graph", "run", "ui"))
    failed = subprocess.run([*command, "config", "show", "nowhere.yaml"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr == "error: nowhere.yaml: no such file.\n"


def test_a_project_may_have_folders_of_our_names(tmp_path: Path):
    for name in ("flows", "planner", "rlhf_tasks", "blocks", "deployments"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("theirs = True\n")
    theirs = "import flows, planner, rlhf_tasks, blocks, deployments"
    program = f"{theirs}\nfrom prefect_rlhf.flows.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "graph", "ppo"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert "actor_generate" in ended.stdout


@pytest.mark.parametrize(
    ("stated", "hosts"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "firm.example"}, "firm.example,localhost,127.0.0.1,::1"),
        ({"no_proxy": ".firm, 127.0.0.1", "NO_PROXY": "x"}, ".firm,127.0.0.1,localhost,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_no_proxy_stands_between_a_run_and_its_server_and_the_users_own_exceptions_stay(
    monkeypatch, stated, hosts
):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    made = direct_to_loopback(stated)
    assert made == {"no_proxy": hosts, "NO_PROXY": hosts}
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    assert proxy_bypass("127.0.0.1:4200")
    assert proxy_bypass("localhost")
    assert bool(proxy_bypass("hub.example")) == (hosts == "*")
