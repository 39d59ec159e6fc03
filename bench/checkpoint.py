"""Measures what commits cost: how fast a rank's part is written, and a run of large state that is killed and resumed.

    python -m bench.checkpoint [--parameters 1e9] [--repeats 3] [--folder DIR]
    python -m bench.checkpoint --copy [--parameters 1e8] [--repeats 3]
    python -m bench.checkpoint --run [--parameters 1e8] [--ranks 1] [--folder DIR]

The first writes the part of one rank that trains so many parameters: float32 master weights and two moments, 12 bytes
each, hashed, synced and read back. Beside it, in turns, stands a plain write of the same bytes with one fsync. The
tensors share 256 MiB of memory, so 1e9 parameters are 12 GB on the disk and not in memory.

The second copies such a state from a GPU to host memory, which is all that training waits for: to memory that torch
allocates each time, to pinned memory for the first time, and to the same again.

The third fine-tunes a model of this size for four iterations with a commit each, is killed with SIGKILL in the third
while a commit is written, and goes on by its command. Its last commit is compared with that of an undisturbed run,
byte by byte. It needs about 40 bytes of memory for each parameter. Prints one JSON line per row.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from flows.demo import byte_tokenizer
from rlhf_tasks.checkpoint.commits import step_folder
from rlhf_tasks.checkpoint.manifest import verify
from rlhf_tasks.parallel.comm.copier import host_copies
from rlhf_tasks.parallel.state.files import write_shards
from rlhf_tasks.parallel.train.optimizer import StateShard
from rlhf_tasks.system.failpoints import VARIABLE

SHARED_BYTES = 1 << 28
PIECE_BYTES = 1 << 22  # of the plain write
ITERATIONS = 4
WIDTH = 2048  # of the model of a run; a layer has 67 million parameters
KILLED = f"shard_begun:kill@rank0@iter{ITERATIONS - 2}@attempt1"


def shards_of(parameters: int) -> list[StateShard]:
    """The state of so many parameters, in tensors that share memory."""
    shared = torch.randn(SHARED_BYTES // 4)
    shards = []
    for number, start in enumerate(range(0, parameters, len(shared))):
        size = min(len(shared), parameters - start)
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            shards.append(StateShard(f"layer.{number}", kind, 0, size, shared[:size]))
    return shards


def plain_write(path: Path, shards: list[StateShard]) -> None:
    """The same tensors with nothing but write and fsync."""
    with path.open("wb") as file:
        for shard in shards:
            data = shard.tensor.view(torch.uint8).numpy().data
            for start in range(0, len(data), PIECE_BYTES):
                file.write(data[start : start + PIECE_BYTES])
        file.flush()
        os.fsync(file.fileno())


def seconds_of(work: Callable[[], object], path: Path) -> tuple[float, float]:
    """Wall and CPU seconds of writing a file, which is removed afterwards."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    taken = time.perf_counter() - began_s, time.process_time() - cpu_s
    path.unlink()
    return taken


def measure_writing(parameters: int, repeats: int, folder: Path) -> None:
    """Print the rates of both ways to write, and their ratio."""
    shards, path = shards_of(parameters), folder / "part.safetensors"
    n_bytes = sum(shard.tensor.nbytes for shard in shards)
    ways = {"plain": lambda: plain_write(path, shards), "part": lambda: write_shards(path, 0, shards)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            taken[name].append(seconds_of(work, path))
    wall_s = {name: statistics.median(wall for wall, _ in times) for name, times in taken.items()}
    cpu_s = {name: statistics.median(cpu for _, cpu in times) for name, times in taken.items()}
    row = {
        "parameters": parameters,
        "bytes": n_bytes,
        **{f"{name}_bytes_per_s": round(n_bytes / seconds) for name, seconds in wall_s.items()},
        **{f"{name}_cpu_s": round(seconds, 2) for name, seconds in cpu_s.items()},
        "of_plain": round(wall_s["plain"] / wall_s["part"], 3),
        "of_plain_each": [round(a[0] / b[0], 3) for a, b in zip(*taken.values(), strict=True)],
    }
    print(json.dumps(row), flush=True)


def measure_copying(parameters: int, repeats: int) -> None:
    """Print what it takes to copy a state of this size from a GPU, in three ways."""
    sizes = [min(WIDTH * WIDTH, parameters - start) for start in range(0, parameters, WIDTH * WIDTH)]
    state = [torch.randn(size, device="cuda") for size in sizes for _ in range(3)]
    kept: list[torch.Tensor] = []

    def again() -> list[torch.Tensor]:
        return host_copies(state, kept)

    seconds: dict[str, list[float]] = {}
    for _ in range(repeats):
        torch.cuda.synchronize()
        for name, copy in (
            ("plain", lambda: [one.to("cpu", copy=True) for one in state]),
            ("pinned", lambda: host_copies(state)),
            ("again", again),
        ):
            began_s = time.perf_counter()
            copies = copy()
            seconds.setdefault(name, []).append(time.perf_counter() - began_s)
            kept = kept or (copies if name == "pinned" else [])
            assert all(torch.equal(one.cpu(), there) for one, there in zip(state, copies, strict=True))
    n_bytes = sum(one.nbytes for one in state)
    medians = {name: round(statistics.median(taken), 3) for name, taken in seconds.items()}
    print(json.dumps({"bytes": n_bytes, "device": torch.cuda.get_device_name(0), "seconds": medians}))


def write_model(folder: Path, parameters: int) -> int:
    """A model of about so many parameters; gives their number."""
    tokenizer = byte_tokenizer()
    layers = max(1, round(parameters / (4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH)))
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=tokenizer.get_vocab_size() + 1,
        eos_token_id=tokenizer.get_vocab_size(),
        tie_word_embeddings=True,
    )
    set_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model.num_parameters()


def run(folder: Path, name: str, ranks: int, failpoint: str = "", resume: bool = False) -> float:
    """Begin a run, or go on with it, to its end or its death; the seconds that it took."""
    document = {
        "type": "sft",
        "name": name,
        "models": {"actor": str(folder / "model")},
        "data": {"train": str(folder / "rows.jsonl")},
        "output_dir": str(folder / "runs"),
        "batch_size": 2 * ranks,
        "total_iterations": ITERATIONS,
        "snapshot_every": 1,
        "cluster": {"devices_per_host": ranks},
        "runtime": {"max_restarts": 0},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(document))
    how = ["--resume", str(folder / "runs" / name)] if resume else ["--config", str(file)]
    began_s = time.perf_counter()
    log = (folder / f"{name}.log").open("a")
    ended = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", "sft", *how],
        env={**os.environ, VARIABLE: failpoint},
        stdout=log,
        stderr=log,
        check=False,
    )
    expected_to_die = bool(failpoint)
    if (ended.returncode != 0) != expected_to_die:
        raise SystemExit(
            f"{name} ended with {ended.returncode}:\n{(folder / f'{name}.log').read_text()[-4000:]}"
        )
    return time.perf_counter() - began_s


def measure_run(parameters: int, ranks: int, folder: Path) -> None:
    """Print what a killed and resumed run of this size took, and whether it ended as the undisturbed one."""
    found = write_model(folder / "model", parameters)
    rows = [{"prompt": f"{number} says ", "completion": "abcdefgh"} for number in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    undisturbed_s = run(folder, "undisturbed", ranks)
    ends = [_last_commit(folder / "runs" / "undisturbed")]
    shutil.rmtree(folder / "runs" / "undisturbed")
    killed_s = run(folder, "killed", ranks, KILLED)
    there = sorted(path.name for path in (folder / "runs" / "killed").glob("step-*"))
    resumed_s = run(folder, "killed", ranks, resume=True)
    ends.append(_last_commit(folder / "runs" / "killed"))
    row = {
        "parameters": found,
        "ranks": ranks,
        "commit_bytes": sum(size_bytes for size_bytes, _ in ends[0]),
        "undisturbed_s": round(undisturbed_s, 1),
        "killed_s": round(killed_s, 1),
        "left": there,
        "resumed_s": round(resumed_s, 1),
        "same_bytes": ends[0] == ends[1],
    }
    print(json.dumps(row), flush=True)


def _last_commit(run_folder: Path) -> list[tuple[int, str]]:
    """Size and SHA-256 of the files of the last commit, which are checked once more."""
    return [
        (stored.size_bytes, stored.sha256) for stored in verify(step_folder(run_folder, ITERATIONS)).files
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--copy", action="store_true")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.copy:
            measure_copying(int(given.parameters or 1e8), given.repeats)
        elif given.run:
            measure_run(int(given.parameters or 1e8), given.ranks, Path(folder))
        else:
            measure_writing(int(given.parameters or 1e9), given.repeats, Path(folder))


if __name__ == "__main__":
    main()
