"""What segments gain where the lengths of responses have a long tail: REINFORCE++ on one rank.

    python -m bench.long_tails [--iterations 12] [--segment-tokens 16] [--batch-size 64]

Nine prompts of ten get short responses, the tenth gets long ones: the 99th percentile is about ten times the median.
No two prompts of a batch are equal, since equal ones are read once. Three runs learn from the same mean number of
tokens:

    even      every response has the mean length, so nothing waits for anything: the work bound
    whole     every response is drawn to its end
    segments  with `sampling.segment_tokens`

Printed are seconds per 1,000 tokens that are learned from, of the whole iteration and of generation, their ratio to
those of `even`, and by how much the planner's prediction is off, from a profile of the rank. The runs take turns
(--repeats). The machine should be idle.
"""

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from bench.harness import RankPool, Spread, in_turn, options
from bench.plan_runs import PlanRun, measured_profile, predicted, run_plan
from flows.demo import byte_tokenizer
from flows.run.prepare import prepare
from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.config.base import RunConfig
from rlhf_tasks.spec import ExecutionPlan

VOCAB, LONGEST, END = 260, 160, 2  # END: <eos> of the byte tokenizer
SHORT, LONG = 1 / 14, 1 / 75  # probabilities of the end token
LETTERS = "abcdefghijklmnop"  # of prompts; those with odd ids get short responses
REWARD = (
    "def length(prompts, completions, **columns):\n    return [float(len(set(c))) for c in completions]\n"
)
PROMPT_TOKENS = 16
NAMES = {("even", False): "even", ("tail", False): "whole", ("tail", True): "segments"}
Figures = dict[str, float]


def write_model(folder: Path, with_end: bool) -> None:
    """A Llama of 5M parameters whose tokens are of two kinds, by whether their id is odd.

    Dim 0 of the hidden states says the kind, dim 1 is constant. A token is followed by one of its kind. with_end: the
    end token has the probability SHORT after odd ids and LONG after even ones; else it does not come.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=1024,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=END,
    )
    set_seed(1234)
    model = LlamaForCausalLM(config)
    odd = torch.arange(VOCAB) % 2 == 1
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding[:, 0] = torch.where(odd, 3.0, -3.0)
        embedding[:, 1] = 3.0
        head[:, 0] = torch.where(odd, 1.0, -1.0)
        head[:4] = 0.0  # the special tokens
        head[:4, 1] = -4.0
        if with_end:
            head[END] = _end_row(model, odd)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))


def _end_row(model: LlamaForCausalLM, odd: torch.Tensor) -> torch.Tensor:
    """The head's row of the end token: [hidden]; two numbers in it make its two probabilities."""
    states, wanted = [], []
    for kind, probability in ((odd, SHORT), (~odd, LONG)):
        ids = kind.nonzero().squeeze(1)
        ids = ids[ids >= 4]
        tokens = ids[torch.randint(len(ids), (16, 48))]
        hidden = model.model(tokens).last_hidden_state.flatten(0, 1)
        others = torch.logsumexp(model.lm_head(hidden), -1).mean()
        states.append(hidden[:, :2].mean(0))
        wanted.append(math.log(probability / (1 - probability)) + others)
    row = torch.zeros(model.config.hidden_size)
    row[:2] = torch.linalg.solve(torch.stack(states), torch.stack(wanted))
    return row


class Bench:
    """The models and prompts, and the runs on one rank."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, pool: RankPool) -> None:
        self._given, self._folder, self._pool, self._runs = arguments, folder, pool, 0
        self.plans: dict[tuple[str, int | None], tuple[RunConfig, ExecutionPlan]] = {}
        write_model(folder / "tail", with_end=True)
        write_model(folder / "even", with_end=False)
        ids = byte_tokenizer().encode(LETTERS).ids
        of_kind = ["".join(x for x, i in zip(LETTERS, ids, strict=True) if i % 2 == odd) for odd in (0, 1)]
        prompts = [islice(map("".join, product(letters, repeat=4)), 4096) for letters in of_kind]
        rows = [json.dumps({"prompt": next(prompts[i % 10 != 9]) * 4}) for i in range(4096)]
        (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        (folder / "reward.py").write_text(REWARD)

    def run(self, model: str, most: int, segment: int | None = None) -> Figures:
        """Seconds per 1,000 learned tokens, and the mean length, after the iterations that fill the places."""
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        folder.mkdir()
        sampling: dict[str, Any] = {"max_completion_length": most}
        if segment is not None:
            sampling["segment_tokens"] = segment
        prepared = prepare(
            make_config(
                {
                    "type": "reinforce_pp",
                    "models": {"actor": str(self._folder / model)},
                    "data": {"train": str(self._folder / "prompts.jsonl")},
                    "output_dir": str(self._folder / "runs"),
                    "sampling": sampling,
                    "rewards": [{"function": f"{self._folder}/reward.py:length"}],
                    "batch_size": self._given.batch_size,
                    "beta": 0.0,
                    "total_iterations": 1000,
                    "optimizer": {"learning_rate": 1e-9},
                    "plan": "heuristic",
                    "planning": {"new_tokens": lengths(model, most)},
                }
            )
        )
        prepared.rows.keep(folder)
        self.plans[model, segment] = prepared.config, prepared.plan
        before = 2 if segment is None else 6  # places fill up in the first iterations
        document = prepared.config.model_dump(mode="json")
        iterations = before + self._given.iterations
        runs = self._pool.run(run_plan, prepared.plan.model_dump_json(), document, str(folder), iterations)
        return figures(runs, before, self._given.batch_size)


def lengths(model: str, most: int) -> dict[int, float]:
    """Tokens of a response -> share: of all the most, or of short and long ones, which end at random."""
    if model == "even":
        return {most: 1.0}
    shares = [
        sum(part * p * (1 - p) ** (n - 1) for part, p in ((0.9, SHORT), (0.1, LONG))) for n in range(1, most)
    ]
    return {**dict(enumerate(shares, 1)), most: 1 - sum(shares)}


def figures(runs: Sequence[PlanRun], before: int, batch_size: int) -> Figures:
    """Of the iterations from `before` on: seconds per 1,000 learned tokens (iteration, generation), mean length."""
    ends: dict[int, float] = defaultdict(float)
    tokens = samples = generation_s = 0.0
    for t in (t for run in runs for t in run.times):
        ends[t.iteration] = max(ends[t.iteration], t.ended_s)
        if t.node != "actor_generate" or t.iteration < before:
            continue
        samples += batch_size
        tokens += batch_size * t.metrics["completions/mean_length"]
        generation_s += t.ended_s - t.started_s
    whole_s = ends[max(ends)] - ends[before - 1]
    return {
        "iteration": whole_s / tokens * 1e3,
        "generation": generation_s / tokens * 1e3,
        "mean_length": tokens / samples,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--iterations", type=int, default=12, help="timed iterations of each run")
    parser.add_argument("--segment-tokens", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RankPool(1) as pool:
        bench = Bench(arguments, Path(folder), pool)
        # The runs of even lengths need the mean of the others, so that a first one comes before them.
        mean_length = round(bench.run("tail", LONGEST)["mean_length"])
        ways = {
            "whole": lambda: bench.run("tail", LONGEST),
            "segments": lambda: bench.run("tail", LONGEST, arguments.segment_tokens),
            "even": lambda: bench.run("even", mean_length),
        }
        found = in_turn(ways, arguments.repeats)
        profile = measured_profile(
            pool, Path(folder) / "tail", 2 * arguments.batch_size, PROMPT_TOKENS, PROMPT_TOKENS + LONGEST
        )
        prices = {
            NAMES[model, segment is not None]: predicted(config, plan, profile)
            for (model, segment), (config, plan) in bench.plans.items()
        }
    for name in ("even", "whole", "segments"):
        cells = [f"mean length {median(one['mean_length'] for one in found[name]):.1f}"]
        for part in ("iteration", "generation"):
            each = [one[part] / even[part] for one, even in zip(found[name], found["even"], strict=True)]
            seconds = median(one[part] for one in found[name])
            price, tokens = (
                prices[name],
                arguments.batch_size * median(one["mean_length"] for one in found[name]),
            )
            priced_s = price.iteration_time_s if part == "iteration" else price.duration_s["actor_generate"]
            off = priced_s / tokens * 1e3 / seconds - 1
            cells.append(f"{part} {seconds:.3f} s, {Spread.of(each)}, predicted {off:+.0%}")
        print(f"{name:<10}" + "   ".join(cells))


if __name__ == "__main__":
    main()
