"""What the number of rows costs: time and memory until the first iteration.

    python -m bench.rows [--rows 1000 1000000] [--words 12]

For each number of rows, every step in a process of its own: the check of a new run, which tokenises the rows; the
check of a run that has its token file; a rank's first batch of samples; and a whole run of one iteration by the
command line (SFT of the demo's model on one rank). Seconds are wall time without Python's imports. Memory is by how
much the peak of the process grew; in brackets what is left of its own pages at the end: the rest is pages of mapped
files, which the system may drop.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flows.demo import write_model_folder

STEPS = ("new run", "kept rows", "rank")
BATCH = 256  # samples that a rank fetches


def write_rows(path: Path, n_rows: int, words: int) -> int:
    """Prompts and completions of random words; gives the file's bytes."""
    rng = random.Random(0)
    stock = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 9))) for _ in range(5000)]
    with path.open("w") as file:
        for i in range(n_rows):
            prompt, completion = (" ".join(rng.choices(stock, k=words // 2)) for _ in range(2))
            file.write(json.dumps({"prompt": f"{i} {prompt}", "completion": completion}) + "\n")
    return path.stat().st_size


def document(folder: Path, n_rows: int) -> dict:
    """SFT on the rows: an algorithm with nothing but its data and one model."""
    return {
        "type": "sft",
        "models": {"actor": str(folder / "actor")},
        "data": {"train": str(folder / f"{n_rows}.jsonl"), "max_prompt_tokens": 4096},
        "output_dir": str(folder / f"runs-{n_rows}"),
        "batch_size": 8,
        "total_iterations": 1,
        "cluster": {"devices_per_host": 1},
    }


def step(name: str, folder: Path, n_rows: int) -> None:
    """One step, in this process; prints its seconds, the growth of its peak and of its own memory in bytes."""
    from flows.run.prepare import prepare
    from rlhf_tasks.algorithms.configurations import make_config
    from rlhf_tasks.algorithms.fetch import fetch
    from rlhf_tasks.data.token_file import ROWS, TokenFile

    config, kept = make_config(document(folder, n_rows)), folder / f"kept-{n_rows}"
    kept.mkdir(exist_ok=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, see proc(5)
    before, own, started_s = status_bytes("VmHWM"), status_bytes("RssAnon"), time.perf_counter()
    if name == "rank":
        rows = TokenFile.open(kept / ROWS)
        fetch(rows, config, range(BATCH))
    else:
        prepare(config, kept).rows.keep(kept)
    seconds = time.perf_counter() - started_s
    print(json.dumps([seconds, status_bytes("VmHWM") - before, status_bytes("RssAnon") - own]))


def status_bytes(name: str) -> int:
    """A figure of this process's memory by the system."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def run_seconds(folder: Path, n_rows: int) -> float:
    """Wall seconds from the command to the first commit."""
    config = folder / f"{n_rows}.json"
    config.write_text(json.dumps({**document(folder, n_rows), "name": "first"}))  # JSON is YAML
    began_s, run = time.time(), folder / f"runs-{n_rows}" / "first"
    command = [sys.executable, "-m", "flows.cli", "run", "sft", "--config", str(config)]
    with (folder / "run.log").open("w") as log:
        subprocess.run(command, check=True, timeout=1800, stdout=log, stderr=log)
    return (run / "step-00000001").stat().st_mtime - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--words", type=int, default=12)
    parser.add_argument("--step", nargs=3, metavar=("NAME", "FOLDER", "ROWS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        name, folder, n_rows = arguments.step
        return step(name, Path(folder), int(n_rows))
    from transformers import LlamaConfig, LlamaForCausalLM  # not in the steps' processes

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model_folder(folder / "actor")
        LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "actor")).save_pretrained(folder / "actor")
        for n_rows in arguments.rows:
            size_bytes = write_rows(folder / f"{n_rows}.jsonl", n_rows, arguments.words)
            print(f"{n_rows} rows, {size_bytes / 1e6:.1f} MB")
            for name in STEPS:
                command = [sys.executable, "-m", "bench.rows", "--step", name, place, str(n_rows)]
                out = subprocess.run(command, check=True, timeout=3600, capture_output=True, text=True).stdout
                seconds, peak_bytes, own_bytes = json.loads(out.splitlines()[-1])
                print(f"  {name:10} {seconds:8.2f} s  {peak_bytes / 1e6:8.1f} MB ({own_bytes / 1e6:.1f} MB)")
            kept = folder / f"kept-{n_rows}" / "rows.arrow"
            print(f"  token file {kept.stat().st_size / 1e6:8.1f} MB")
            print(f"  first commit of a run after {run_seconds(folder, n_rows):.1f} s")


if __name__ == "__main__":
    main()
