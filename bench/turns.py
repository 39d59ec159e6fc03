"""Responses of several turns whose environments think for long: waiting for nobody beside lockstep, on the CPU.

    python -m bench.turns [--sequences 128] [--rounds 3]

A Llama of 5M parameters, float32, one thread, one rank. Prompts of 32 tokens, 4 turns of 16, observations of 16
between them. An environment thinks for a time that varies by ten from turn to turn, log-uniformly, up to the seconds
named.

Nobody sleeps: the clock is the process's CPU time, and where only environments would go on, it is put forward. So
other load on the machine changes little, and what is measured is how often the ranks wait.

    slots    sequences that the cache has room for, if all are as long as they may be
    longest  seconds that an environment thinks at most
    bound    seconds of the same work where all answer at once
    apart    seconds where each sequence goes on as soon as it is answered, and the bound as a share of them
    lockstep the same where nobody goes on before all have been answered
    again    tokens that were read again, for each turn; new ones are 16

Medians over the rounds; the ways take turns.
"""

import random
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM

from bench.generation import CONFIG, PROMPT, Alone, prompts_of
from bench.harness import Spread, in_turn, options
from bench.models import build_engine
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import generate
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams
from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Following, Turns
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

TURNS, DRAWN, OBSERVED = 4, 16, 16
TOKENS = TURNS * (DRAWN + OBSERVED) - OBSERVED


class Thinking:
    """Partners that answer after a while. Seconds are of the clock that the module's docstring describes.

    longest_s  seconds of the longest thought; the shortest is a tenth of it
    lockstep   nobody is answered before all have been
    """

    def __init__(self, longest_s: float, lockstep: bool) -> None:
        self._longest_s, self._lockstep = longest_s, lockstep
        self._began_s, self._skipped_s = time.process_time(), 0.0
        self._turns: dict[int, int] = {}
        self._due_s: dict[int, float] = {}
        self.read = 0

    @property
    def now_s(self) -> float:
        return time.process_time() - self._began_s + self._skipped_s

    def begun(self, sample: int, read: int) -> None:
        self.read += read

    def ended(self, sample: int, turn: Sequence[int], is_cut: bool) -> None:
        number = self._turns[sample] = self._turns.get(sample, 0) + 1
        thought = self._longest_s * 10 ** -random.Random(1000 * sample + number).random()
        self._due_s[sample] = self.now_s + (0.0 if number == TURNS else thought)

    def answered(self, samples: Collection[int], wait_s: float) -> list[Following]:
        if self._lockstep and not wait_s:
            return []
        if wait_s:  # nobody is drawn: the next thing that happens is an answer
            next_s = max(self._due_s.values()) if self._lockstep else min(self._due_s.values())
            self._skipped_s += max(0.0, next_s - self.now_s)
        now_s = self.now_s
        ready = [sample for sample in sorted(samples) if self._due_s[sample] <= now_s]
        for sample in ready:
            del self._due_s[sample]
        return [self._following(sample) for sample in ready]

    def _following(self, sample: int) -> Following:
        if self._turns[sample] == TURNS:
            return Following(sample)
        ids = [(sample + 13 * self._turns[sample] + place) % CONFIG.vocab_size for place in range(OBSERVED)]
        return Following(sample, ids, DRAWN)


class Work:
    """What a generation took: seconds, tokens that were read again for each turn."""

    def __init__(
        self, engine: Engine, sequences: int, micro_batches: int, longest_s: float, lockstep: bool
    ) -> None:
        partners = Thinking(longest_s, lockstep)
        samples = generate(
            engine,
            prompts_of(sequences),
            SamplingParams(max_new_tokens=TOKENS),
            seed=0,
            iteration=0,
            micro_batches=micro_batches,
            turns=Turns(DRAWN, partners),
        )
        self.seconds = partners.now_s
        assert samples is not None
        assert int(samples["response_mask"].values.sum()) == sequences * TURNS * DRAWN
        new = sequences * (PROMPT - 1 + (TURNS - 1) * OBSERVED)
        self.again = (partners.read - new) / (sequences * TURNS)


def main() -> None:
    """Print the table."""
    parser = options(__doc__)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    groups: Any = Alone()
    engine = build_engine(LlamaForCausalLM(CONFIG), groups)
    sequences = given.sequences
    print(f"{sequences} sequences, {TURNS} turns of {DRAWN} tokens, {OBSERVED} observed between them")
    heads = ("slots", "longest", "bound", "apart", "", "again", "lockstep", "", "again")
    print(" ".join(f"{head:>8}" for head in heads))
    for micro_batches in (1, 2, 4):
        for longest_s in (0.5, 1.0, 2.0):
            ways = {
                "bound": partial(Work, engine, sequences, micro_batches, 0.0, False),
                "apart": partial(Work, engine, sequences, micro_batches, longest_s, False),
                "lockstep": partial(Work, engine, sequences, micro_batches, longest_s, True),
            }
            took = in_turn(ways, given.rounds)
            bound, apart, lockstep = (Spread.of([work.seconds for work in took[way]]).median for way in ways)
            print(
                f"{-(-sequences // micro_batches):8} {longest_s:8.1f} {bound:8.2f} {apart:8.2f} {bound / apart:8.0%} "
                f"{took['apart'][0].again:8.1f} {lockstep:8.2f} {bound / lockstep:8.0%} "
                f"{took['lockstep'][0].again:8.1f}"
            )


if __name__ == "__main__":
    main()
