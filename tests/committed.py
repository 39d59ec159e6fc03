"""What a run folder says of its run, to be compared bit by bit. Import as `tests.committed`."""

import json

from safetensors import safe_open

from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder
from prefect_rlhf.rlhf_tasks.checkpoint.manifest import verify


def state_at(folder, step):
    """Everything that a commit says of the run: (role, rank, tensor) -> bytes; what stands in the manifest."""
    manifest = verify(step_folder(folder, step))
    tensors = {}
    for stored in manifest.files:
        with safe_open(step_folder(folder, step) / stored.file, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                tensor = file.get_tensor(name)
                rank = stored.file.split(".")[1]
                tensors[stored.role, rank, name] = (str(tensor.dtype), tensor.numpy().tobytes())
    return tensors, (manifest.cursor, manifest.versions, manifest.roles)


def metrics_of(folder):
    """The lines of metrics.jsonl, without what clocks say (`mfu` among it)."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if "time" not in k and "throughput/" not in k and k != "mfu"}
        for line in lines
    ]


def moves_of(folder):
    """What lineage.jsonl says of each node, without clocks and generations."""
    lines = [json.loads(line) for line in (folder / "lineage.jsonl").read_text().splitlines()]
    return [[line[k] for k in ("iteration", "node", "versions", "bytes_sent", "digest")] for line in lines]


def last_step(folder):
    """The number of the newest commit."""
    numbers = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return max(int(number) for number in numbers if number.isdigit())  # others are being written


def assert_same_run(folder, undisturbed):
    """Weights, moments, versions, role states, cursor, metrics and digests are those of the undisturbed run."""
    step = last_step(undisturbed)
    assert last_step(folder) == step
    assert state_at(folder, step) == state_at(undisturbed, step)
    assert metrics_of(folder) == metrics_of(undisturbed)
    assert moves_of(folder) == moves_of(undisturbed)
    assert not list(folder.glob("*.tmp-*")), "unfinished commits are left"


def generations_of(folder):
    """Iteration -> (attempt, generation) that made its committed result."""
    lines = [json.loads(line) for line in (folder / "lineage.jsonl").read_text().splitlines()]
    return {line["iteration"]: (line["attempt"], line["generation"]) for line in lines}
