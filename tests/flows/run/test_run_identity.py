"""A run continues as its last commit left it: a change is refused with the difference, unless it is accepted."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.flows.run.run_folder import new_run_folder
from prefect_rlhf.flows.run.run_identity import keep_identity, model_digests
from prefect_rlhf.flows.run.summary import read_jsonl
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.checkpoint.changes import last_accepted
from prefect_rlhf.rlhf_tasks.checkpoint.commits import RunSnapshots, step_folder, unfinished_folder
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import (
    CheckpointError,
    PartReport,
    RoleRecord,
    StoredFile,
    read_manifest,
)
from prefect_rlhf.rlhf_tasks.checkpoint.snapshots import packed_bytes
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import read_shape
from prefect_rlhf.rlhf_tasks.parallel.train.state_files import pieces_of, write_checked
from prefect_rlhf.rlhf_tasks.protocol.messages import RunSpec, WriteCommit
from prefect_rlhf.rlhf_tasks.spec import NodeKey, NodeResult
from tests.flows.checked_files import model_folder
from tests.rlhf_tasks.settings import limits

EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture
def run(document, tmp_path):
    """The folder of a run that has committed two iterations, with a reference model of its own."""
    model_folder(tmp_path / "ref")
    document["models"]["ref"] = str(tmp_path / "ref")
    document |= {"name": "mine", "total_iterations": 4}
    prepared = prepare(make_config(document))
    folder = new_run_folder(prepared.config)
    keep_identity(folder, prepared)
    snapshots = snapshots_of(folder, prepared)
    snapshots.latest()
    for step in range(3):
        commit(snapshots, prepared, folder, step)
    return folder


def snapshots_of(folder, prepared, attempt=1):
    spec = RunSpec(
        run="mine",
        attempt=attempt,
        ranks=("a", "b"),
        plan=prepared.plan,
        config=prepared.config.model_dump(mode="json"),
        run_folder=str(folder),
        iterations=9,
        limits=limits(),
    )
    return RunSnapshots(spec)


def commit(snapshots, prepared, folder, step, in_flight=b"", details=None):
    """in_flight: a file of samples, of a run that draws ahead; details: of the result of the step's last call"""
    unfinished = unfinished_folder(folder, step, 1)
    unfinished.mkdir()
    (unfinished / "actor.safetensors").touch()
    stored = StoredFile(role="actor", file="actor.safetensors", size_bytes=0, sha256=EMPTY_SHA256)
    record = RoleRecord(
        version=step,
        optimizer_step=step,
        state={},
        shape=read_shape(prepared.config.models.actor),
        head="lm",
        placement=Placement((0,), ParallelStrategy()),
    )
    part = PartReport(stored=stored, record=record).model_dump(mode="json")
    saves = {"save": {0: part}}
    if in_flight:
        written = write_checked(unfinished / "drawn.safetensors", pieces_of(in_flight))
        drawn = StoredFile(role="actor_generate", file="drawn.safetensors", **written._asdict())
        saves["save_samples"] = {0: PartReport(stored=drawn, record=None).model_dump(mode="json")}
    results = {}
    if step:
        key = NodeKey("mine", 1, 0, step - 1, "actor_train")
        done = NodeResult(
            key=key, rank=0, started_s=1.0, ended_s=2.0, metrics={"loss": float(step)}, details=details or {}
        )
        results = {step - 1: {"actor_train": {0: done}}}
    order = WriteCommit(step, tuple(results), saves, 8 * step, {"actor": step}, prepared.plan)
    snapshots.commit(order, results)


@pytest.fixture
def resume(call, run, monkeypatch):
    """Go on with the run; gives (status, output and errors, the configurations that were begun)."""
    begun = []
    monkeypatch.setattr(
        "prefect_rlhf.flows.commands.local_run.run_here",
        lambda folder, prepared: begun.append(prepared.config),
    )

    def go_on(*more):
        status, out, err = call("run", "ppo", "--resume", str(run), *more)
        return status, (out + err).replace("\n", " "), begun

    return go_on


def edit(path: Path, **keys) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **keys}))


CHANGES = {
    "the learning rate": (
        lambda run: edit(run / "config.json", optimizer={"learning_rate": 0.5}),
        "optimizer.learning_rate 3e-06 (now 0.5)",
    ),
    "the data": (
        lambda run: (run.parents[1] / "prompts.jsonl").write_text('{"prompt": "xyz"}\n{"prompt": "de"}\n'),
        "prompts.jsonl has other rows",
    ),
    "a frozen model": (
        lambda run: (run.parents[1] / "ref" / "generation_config.json").write_text("{}"),
        "ref has changed: generation_config.json",
    ),
    "a line of a journal": (
        lambda run: (run / "lineage.jsonl").write_bytes(
            (run / "lineage.jsonl").read_bytes().replace(b'{"iteration": 0', b'{"iteration"; 0', 1)
        ),
        "lineage.jsonl:1 is not as it was written",
    ),
}


def test_an_accepted_change_drops_the_samples_in_flight_and_says_so(run, resume):
    prepared = prepare(make_config(json.loads((run / "config.json").read_text())), run)
    snapshots = snapshots_of(run, prepared)
    snapshots.latest()
    batches = [
        SampleBatch((24, 25), {"old_logprobs": Packed(torch.ones(5), (2, 3))}),
        SampleBatch((32, 33), {"left_number": Packed(torch.tensor([23, -1]), (1, 1))}),
    ]
    commit(snapshots, prepared, run, 3, packed_bytes(batches, {}))
    status, said, _ = resume("--accept-changes")
    assert status == 0
    assert "dropped" not in said, "nothing has changed"
    CHANGES["the learning rate"][0](run)
    status, said, _ = resume("--accept-changes")
    assert status == 0, said
    assert (
        "accepted: the samples in flight, drawn ahead of their training or begun in segments, are dropped: "
        "iteration 4 draws its own"
    ) in said
    edit(run / "config.json", seed=5)
    status, said, _ = resume("--accept-changes")
    assert status == 0, said
    assert "dropped" not in said, "they were dropped before"


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_with_the_difference_and_accepted_where_it_is_wanted(run, resume, change):
    do, words = CHANGES[change]
    do(run)
    status, said, begun = resume()
    assert (status, begun) == (2, [])
    assert words in said
    assert f"--resume {run} --accept-changes" in said

    status, said, begun = resume("--accept-changes")
    assert status == 0, said
    assert f"accepted: {words}" in said or words in said
    assert len(begun) == 1
    status, said, begun = resume()
    assert (status, len(begun)) == (0, 2), said
    assert words in json.loads((run / "accepted.jsonl").read_text())["changes"][0]
    prepared = prepare(begun[-1], run)
    assert snapshots_of(run, prepared, attempt=2).latest() == (2, 16), "the controller goes by it, too"


def test_what_was_accepted_names_every_journal(run, resume):
    CHANGES["a line of a journal"][0](run)
    resume("--accept-changes")
    edit(run / "accepted.jsonl", journals={})
    with (run / "accepted.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(CheckpointError, match=r"accepted\.jsonl is not as the run wrote it"):
        last_accepted(run)


def test_an_unchanged_run_goes_on_wherever_its_ranks_are(resume):
    status, said, begun = resume("cluster.address=tcp://127.0.0.1:8786", "max_restarts=7")
    assert status == 0, said
    assert begun[0].cluster.address == "tcp://127.0.0.1:8786"
    assert begun[0].max_restarts == 7


def test_a_wanted_change_may_be_said_on_the_command_line(run, resume):
    status, said, begun = resume("batch_size=4")
    assert (status, begun) == (2, [])
    assert "batch_size=4 would change it" in said
    assert "--accept-changes" in said
    status, said, begun = resume("total_iterations=9", "batch_size=4", "--accept-changes")
    assert status == 0, said
    assert "accepted: total_iterations 4 (now 9)" in said
    assert begun[0].total_iterations == json.loads((run / "config.json").read_text())["total_iterations"] == 9
    prepared = prepare(begun[0], run)
    snapshots = snapshots_of(run, prepared)
    snapshots.latest()
    commit(snapshots, prepared, run, 3)
    assert read_manifest(step_folder(run, 3)).config["total_iterations"] == 9


ORDINARY = {
    "total_iterations=9": "total_iterations 4 (now 9)",
    "optimizer.learning_rate=0.5": "optimizer.learning_rate 3e-06 (now 0.5)",
    "critic_learning_rate=0.5": "critic_learning_rate null (now 0.5)",
    "optimizer.warmup_steps=2": "optimizer.warmup_steps 0 (now 2)",
}


@pytest.mark.parametrize("stated", ORDINARY)
def test_an_ordinary_change_is_accepted_by_being_stated_and_recorded(run, resume, stated):
    status, said, begun = resume(stated)
    assert (status, len(begun)) == (0, 1), said
    assert f"accepted: {ORDINARY[stated]}" in said
    assert "warning: accepted" not in said, "it is what the user has stated"
    accepted = json.loads((run / "accepted.jsonl").read_text())
    assert (accepted["step"], accepted["changes"]) == (2, [ORDINARY[stated]])
    status, said, begun = resume()
    assert (status, begun[0] == begun[1], "accepted" in said) == (0, True, False), (
        "it is the run's own from now on"
    )


def test_a_change_before_the_first_commit_is_the_runs_own_from_then_on(run, resume):
    for made in (*run.glob("step-*"), *run.glob("*.jsonl"), *(run / "attempts").iterdir()):
        shutil.rmtree(made) if made.is_dir() else made.unlink()
    status, said, begun = resume("total_iterations=9")
    assert status == 0, said
    assert begun[0].total_iterations == json.loads((run / "config.json").read_text())["total_iterations"] == 9


@pytest.mark.parametrize("change", CHANGES)
def test_a_stated_change_accepts_no_other(run, resume, change):
    do, words = CHANGES[change]
    do(run)
    status, said, begun = resume("total_iterations=9")
    assert (status, begun) == (2, [])
    assert words in said
    assert not (run / "accepted.jsonl").exists()


def test_what_no_result_depends_on_may_be_stated(run, resume):
    status, said, begun = resume("keep_last=5", "snapshot_every=7", "report_to=[tensorboard]")
    assert (status, "accepted" in said) == (0, False), said
    assert (begun[0].keep_last, begun[0].snapshot_every) == (5, 7)
    assert json.loads((run / "config.json").read_text())["keep_last"] == 5, "the next attempt keeps it"
    for change in ("name=other", "output_dir=elsewhere", "resume=auto"):
        assert resume(change)[0] == 2


@pytest.mark.parametrize("more", [(), ("--accept-changes",)])
def test_a_run_cannot_end_before_what_it_has_committed(run, resume, more):
    status, said, begun = resume("total_iterations=1", *more)
    assert (status, begun) == (2, [])
    assert f"total_iterations=1, but {run} has committed 2 iterations. Give at least that many" in said


def another_model(run):
    shutil.rmtree(run.parents[1] / "model")
    model_folder(run.parents[1] / "model", num_hidden_layers=3)


def manifests_damaged(run):
    for folder in run.glob("step-*"):
        (folder / "manifest.json").write_text("{")


def no_commits(run):
    for folder in run.glob("step-*"):
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (another_model, ("the saved 'actor' has another shape than", "layers 2 (now 3)")),
        (
            lambda run: edit(run / "config.json", lora={"rank": 4, "alpha": 8}),
            (
                "the saved 'actor' has no adapters, the configuration has adapters of rank 4, alpha 8 on down_",
            ),
        ),
        (
            lambda run: edit(run / "config.json", sync_ref_model=True, ref_model_sync_steps=1),
            ("sync_ref_model was false until the last commit, and is true now",),
        ),
        (
            manifests_damaged,
            (
                "has commits, but none that can be read: ",
                "step-00000002/manifest.json: its checksum is not the one in",
            ),
        ),
        (
            no_commits,
            (
                "metrics.jsonl with rows, lineage.jsonl with rows, attempt 1, which has committed step 1",
                "but no commit to resume from",
            ),
        ),
    ],
    ids=["another model", "adapters", "a reference that follows", "damaged commits", "no commits"],
)
def test_what_fits_no_commit_cannot_be_accepted(run, resume, change, parts):
    change(run)
    for more in ((), ("total_iterations=9",), ("--accept-changes",)):
        status, said, begun = resume(*more)
        assert (status, begun) == (2, [])
        assert [part for part in parts if part not in said] == []
    assert len(read_jsonl(run / "metrics.jsonl")) == 2


def test_what_can_be_read_of_a_damaged_journal_is_kept_and_the_rest_put_aside(run, resume):
    journal = run / "metrics.jsonl"
    first, second = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(first[:5] + b"\xff" + first[6:] + second)
    assert resume("--accept-changes")[0] == 0
    assert journal.read_bytes() == second
    assert (run / "metrics.jsonl.damaged-2").read_bytes().endswith(second)
    prepared = prepare(make_config(json.loads((run / "config.json").read_text())), run)
    assert snapshots_of(run, prepared, attempt=2).latest() == (2, 16)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "\ud800"])
def test_damaged_digests_are_a_change_that_may_be_accepted(run, resume, text):
    for name in ("models.json", "data.sha256"):
        (run / name).write_bytes(text.encode(errors="surrogatepass"))
    status, said, begun = resume()
    assert (status, begun) == (2, [])
    assert f"{run / 'models.json'}" in said
    assert "prompts.jsonl has other rows" in said
    assert "Traceback" not in said
    assert resume("--accept-changes")[0] == 0
    assert resume()[0] == 0


@pytest.mark.parametrize("moment", ["write_file", "write_accepted"])
def test_a_journal_is_mended_whenever_the_process_ends(run, resume, monkeypatch, moment):
    journal = run / "metrics.jsonl"
    first, second = journal.read_bytes().splitlines(keepends=True)
    damaged = first[:5] + b"\xff" + first[6:] + second
    journal.write_bytes(damaged)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"prefect_rlhf.flows.run.run_identity.{moment}", killed)
        with pytest.raises(SystemExit):
            resume("--accept-changes")
    assert resume("--accept-changes")[0] == 0
    assert journal.read_bytes() == second
    assert damaged in [path.read_bytes() for path in run.glob("metrics.jsonl.damaged-*")]
    assert resume()[0] == 0


def test_a_large_file_is_sampled_and_another_model_found(tmp_path, monkeypatch, document):
    monkeypatch.setattr("prefect_rlhf.flows.run.run_identity._WHOLE_BYTES", 1000)
    config = make_config(document)
    weights = Path(config.models.actor) / "model.safetensors"
    before = model_digests(config)
    assert model_digests(config) == before
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert model_digests(config) != before
