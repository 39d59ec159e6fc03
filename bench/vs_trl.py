"""Compares a whole run with TRL on the same work, in one go.

    python -m bench.vs_trl [--works ppo grpo rloo dpo sft reward_model] [--models tiny small smollm2]
                           [--dtypes float32 bfloat16] [--lengths full natural] [--repeats 3] [--iterations 4]
                           [--out FILE] [key.sub=value ...]

TRL 1.12 does PPO (the last release that has it), TRL 1.16 the others. Each is installed once, with pip, into an
environment of its own in `.cache/bench`. Our side is `prefect-rlhf run`: flow,
server, workers, commits, with the default configuration; overrides at the end of the command line are for it. A bare
loop with the same arithmetic (bench/floor.py) is the third. They take turns, all with OMP_WAIT_POLICY=PASSIVE.

    ppo           64 prompts of 32 tokens, at most 64 new ones; policy, reference, reward and value model of a shape;
                  4 optimizer steps of each trained model. full: every response has 64 tokens. natural: an end token
                  with a probability of about 1 in 40 ends it, also before 8 tokens: TRL's PPO has no least length
    grpo, rloo    8 such prompts with 8 samples each (smollm2: 4 with 4, and PPO 16 prompts); policy and reference;
                  the reward is the share of vowels; one optimizer step. RLOO of TRL computes the policy's
                  log-probabilities again before it learns
    dpo           16 pairs of 128 tokens, 32 of them their prompt; policy and reference; one optimizer step
    sft           16 sequences of 128 tokens, one optimizer step
    reward_model  16 pairs of 128 tokens, one optimizer step

Models (Llama, tied, random weights): tiny 5M and small 25M parameters, vocabulary 4096; smollm2 the shape of
SmolLM2-135M, vocabulary 49152, only where it is named: an iteration takes minutes. bfloat16 is what each side makes
of it: TRL and the loop compute under autocast, we hold weights in it; all have float32 master weights.

For each work, medians over the iterations after the first of all repeats: seconds of the whole, of generation,
scoring and training (ours by the clocks of the ranks), and CPU seconds of all processes. Beside them the ratio to
ours, above 1 where we are faster, and its spread over the repeats. Seconds on a machine that others use say little;
CPU seconds say more.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import log
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, set_seed

from bench.harness import cpu_s, in_turn, options, write
from bench.models import sizes, write_model
from prefect_rlhf.flows.demo import write_jsonl

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".cache" / "bench"
TRL = {
    "ppo": "1.12.0",
    **dict.fromkeys(("grpo", "rloo", "dpo", "sft", "reward_model"), "1.16.0"),
}
SAMPLES = ("ppo", "grpo", "rloo")
REWARD = '''"""What our side and TRL's are rewarded by."""


def share_of_vowels(completions, **_):
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]
'''
VOCAB, PROMPT, NEW, LENGTH = 4096, 32, 64, 128
SHAPES = {
    "tiny": sizes(256, 4, 4, 4, 1024, VOCAB),
    "small": sizes(512, 7, 8, 8, 1408, VOCAB),
    "smollm2": sizes(576, 30, 9, 3, 1536, 49152),
}
END = 2  # <eos> of the byte tokenizer
PARTS = ("iteration", "generation", "scoring", "training", "cpu")
POLL_S = 0.05

Row = dict[str, float]
"""Part of an iteration -> seconds."""


@dataclass(frozen=True)
class Work:
    """What is to be done. `folder` has the models and, as NAME.jsonl, the rows of each algorithm."""

    algorithm: str
    model: str
    dtype: str
    full_length: bool
    folder: str
    iterations: int
    batch_size: int
    new_tokens: int = NEW
    length: int = LENGTH
    group: int = 8
    learning_rate: float = 1e-6

    def __str__(self) -> str:
        lengths = ("full" if self.full_length else "natural") if self.algorithm in SAMPLES else f"{LENGTH}"
        return f"{self.algorithm} {self.model} {self.dtype} {lengths}"


# Models and rows


def write_models(folder: Path, shape: str, full_length: bool) -> None:
    """Write `actor` and `reward` with random weights.

    full_length  the end token is outside the vocabulary. Otherwise one dim of the hidden states is nearly constant,
                 and the end token's row of the head is larger there, so that its probability is about 1 in 40
    """
    settings = {**SHAPES[shape], "num_labels": 1, "max_position_embeddings": 512}
    settings["eos_token_id"] = settings["vocab_size"] if full_length else END
    for name, kind in (("actor", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        config = LlamaConfig(**settings)
        set_seed(1234)
        model = kind(config)
        if not full_length and name == "actor":
            with torch.no_grad():
                embedding = model.model.embed_tokens.weight
                embedding[:, 0] = 0.2 * config.hidden_size**0.5
                hidden = model.model(torch.randint(VOCAB, (16, 64))).last_hidden_state
                log_p = model.lm_head(hidden).log_softmax(-1)[..., END]
                embedding[END, 0] += (-log(40) - log_p.mean()) / hidden[..., 0].mean()
        write_model(model, folder / name)


def write_rows(folder: Path) -> None:
    """Write 1024 rows for each algorithm; a character of theirs is a token."""
    draw = Random(1234)

    def text(length: int) -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=length))

    # An end token is added to what is learned.
    prompts = [{"prompt": text(PROMPT)} for _ in range(1024)]
    answer = LENGTH - PROMPT - 1
    pairs = [{"prompt": text(PROMPT), "chosen": text(answer), "rejected": text(answer)} for _ in range(1024)]
    rows = {
        **dict.fromkeys(SAMPLES, prompts),
        "sft": [{"prompt": "a", "completion": text(LENGTH - 2)} for _ in range(1024)],
        **dict.fromkeys(("dpo", "reward_model"), pairs),
    }
    (folder / "rewards.py").write_text(REWARD)
    for name, its in rows.items():
        write_jsonl(folder / f"{name}.jsonl", its)


# The three sides


def environment(version: str) -> Path:
    """The Python of an environment with a release of TRL; made at the first use."""
    folder = ENVIRONMENTS / f"trl-{version}"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        print(f"installing TRL {version} in {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        versions = [f"torch=={torch.__version__.split('+')[0]}", f"trl=={version}"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *versions], check=True)
        ready.touch()
    return python


def child_environment() -> dict[str, str]:
    """Of all sides: as a user's, offline, with threads that sleep while they wait."""
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def other(python: Path | str, *command: str, work: Work) -> list[Row]:
    """Run a program that reads a work and writes rows."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "work.json"), Path(folder, "out.json")
        given.write_text(json.dumps(asdict(work)))
        log = Path(folder, "log")
        with log.open("w") as file:
            ended = subprocess.run(
                [python, *command, given, out], env=child_environment(), stdout=file, stderr=file, check=False
            )
        if ended.returncode:
            sys.exit(f"{work}: {command} failed\n{log.read_text()[-3000:]}")
        return json.loads(out.read_text())


def ours(work: Work, overrides: Sequence[str]) -> list[Row]:
    """Run `prefect-rlhf run`.

    CPU seconds are those of all its processes between the first commit and the last, an equal share for each
    iteration between them: a commit may have many short ones.
    """
    folder = Path(tempfile.mkdtemp(prefix="ours-", dir=work.folder))
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(configuration(work, folder)))
    script = Path(sys.executable).with_name("prefect-rlhf")
    command = [script, "run", work.algorithm.replace("_", "-"), "--config", config, *overrides]
    with (folder / "log").open("w") as file:
        process = subprocess.Popen(command, env=child_environment(), stdout=file, stderr=file, cwd=folder)
        committed: list[tuple[int, float]] = []  # (iterations, CPU seconds so far)
        while process.poll() is None:
            n = len(metrics_of(folder))
            if n > (committed[-1][0] if committed else 0):
                committed.append((n, cpu_s(process.pid)))
            time.sleep(POLL_S)
    if process.returncode:
        sys.exit(f"{work}: our run failed\n{(folder / 'log').read_text()[-3000:]}")
    rows = [iteration_row(metrics) for metrics in metrics_of(folder)]
    (first, before_s), (last, after_s) = committed[0], committed[-1]
    for row in rows[first:last]:
        row["cpu"] = (after_s - before_s) / (last - first)
    return rows


def configuration(work: Work, folder: Path) -> dict[str, Any]:
    """The work as a run's configuration; what is not said has its default."""
    models = {"actor": f"{work.folder}/actor"}
    special: dict[str, Any] = {
        "data": {"train": f"{work.folder}/{work.algorithm}.jsonl", "max_prompt_tokens": LENGTH}
    }
    if work.algorithm == "ppo":
        models["reward"] = f"{work.folder}/reward"
        special |= {
            "sampling": {"max_completion_length": work.new_tokens},
            "num_mini_batches": 4,
            "kl_coef": 0.05,
        }
    elif work.algorithm in SAMPLES:
        special |= {
            "sampling": {"max_completion_length": work.new_tokens},
            "rewards": [{"function": f"{work.folder}/rewards.py:share_of_vowels"}],
            "num_generations": work.group,
            "beta": 0.05,
        }
    return {
        "type": work.algorithm,
        "models": models,
        "dtype": work.dtype,
        "batch_size": work.batch_size,
        "total_iterations": work.iterations,
        "optimizer": {"learning_rate": work.learning_rate},
        "output_dir": str(folder / "runs"),
        **special,
    }


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of the one run in a folder."""
    lines = [line for path in folder.glob("runs/*/metrics.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def iteration_row(metrics: Mapping[str, Any]) -> Row:
    """Seconds by the ranks' clocks. Calls that run beside each other are added up."""
    calls = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    row = {"iteration": calls.pop("iteration")}
    for part, ending in (("generation", "_generate"), ("scoring", "_inference"), ("training", "_train")):
        of_part = [seconds for name, seconds in calls.items() if name.endswith(ending)]
        if of_part:
            row[part] = sum(of_part)
    return row


# Measuring


def works(arguments: argparse.Namespace, folder: Path) -> Iterator[Work]:
    """Every work that was asked for, with its models written."""
    for model, lengths in product(arguments.models, ("full", "natural")):
        theirs = folder / f"{model}-{lengths}"
        # The end token that ends what is learned must be in the vocabulary.
        here = [
            a
            for a in arguments.works
            if (lengths in arguments.lengths if a in SAMPLES else lengths == "natural")
        ]
        if here:
            write_models(theirs, model, lengths == "full")
            write_rows(theirs)
        for algorithm, dtype in product(here, arguments.dtypes):
            size, group = (64, 8) if algorithm in SAMPLES and model != "smollm2" else (16, 4)
            full = lengths == "full"
            yield Work(
                algorithm, model, dtype, full, str(theirs), arguments.iterations + 1, size, group=group
            )


def measure(work: Work, repeats: int, overrides: Sequence[str]) -> dict[str, list[list[Row]]]:
    """Side -> its rows of each repeat, without the first iteration. The sides take turns."""
    python = environment(TRL[work.algorithm])
    sides: dict[str, Callable[[], list[Row]]] = {
        "ours": lambda: ours(work, overrides)[1:],
        "TRL": lambda: other(python, str(ROOT / "bench" / "trl_side.py"), work=work)[1:],
    }
    if work.algorithm not in SAMPLES or work.full_length:  # the loop needs sequences of one length
        sides["bare loop"] = lambda: other(sys.executable, "-m", "bench.floor", work=work)[1:]
    return in_turn(sides, repeats)


def medians(repeats: Sequence[Sequence[Row]]) -> Row:
    """Part -> median seconds over all iterations."""
    rows = [row for rows in repeats for row in rows]
    return {
        part: median(row[part] for row in rows if part in row)
        for part in PARTS
        if any(part in r for r in rows)
    }


def report(work: Work, found: Mapping[str, Sequence[Sequence[Row]]]) -> str:
    """One line for each side: medians, and for the others their ratio to ours with the repeats' spread."""
    mine = medians(found["ours"])
    lines = [f"{work!s:<34}" + "".join(f"{part:>20}" for part in mine)]
    for side, repeats in found.items():
        cells, whole = [], medians(repeats)
        for part in mine:
            if part not in whole:
                cells.append(f"{'':>20}")
                continue
            cell = f"{whole[part]:.2f}"
            if side != "ours":
                each = [
                    medians([b])[part] / medians([a])[part]
                    for a, b in zip(found["ours"], repeats, strict=True)
                ]
                cell += f" {whole[part] / mine[part]:.2f} ({min(each):.2f}-{max(each):.2f})"
            cells.append(f"{cell:>20}")
        lines.append(f"  {side:<32}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--works", nargs="+", choices=list(TRL), default=list(TRL))
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["tiny", "small"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--lengths", nargs="+", choices=["full", "natural"], default=["full", "natural"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--iterations", type=int, default=4, help="measured in each repeat, after one that is not"
    )
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of our configuration")
    arguments = parser.parse_intermixed_args()
    flags = Path("/proc/cpuinfo").read_text().split()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, bfloat16 multiplied by: "
        f"{'AMX' if 'amx_bf16' in flags else 'AVX-512' if 'avx512_bf16' in flags else 'float32 units'}",
        flush=True,
    )
    figures = {}
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as folder:
        for work in works(arguments, Path(folder)):
            found = measure(work, arguments.repeats, arguments.overrides)
            figures[str(work)] = found
            print(report(work, found), flush=True)
            write(figures, arguments.out)


if __name__ == "__main__":
    main()
