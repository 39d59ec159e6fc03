"""Responses of several turns whose environments think for long: waiting for nobody beside lockstep, on the CPU.

    python -m bench.turns [--sequences 128] [--rounds 3] [--micro-batches 1 2 4] [--longest 0.25 1 2]
    python -m bench.turns --agents 16 [--rounds 3] [--longest 0 0.3 2]

A Llama of 5M parameters, float32, one thread, one rank. Prompts of 32 tokens, 4 turns of 16, observations of 16
between them. An environment thinks for a time that varies by ten from turn to turn, log-uniformly, up to the seconds
named.

Nobody sleeps: the clock is the process's CPU time, and where only environments would go on, it is put forward. So
other load on the machine changes little, and what is measured is how often the ranks wait.

    slots    sequences that the cache has room for, if all are as long as they may be
    longest  seconds that an environment thinks at most
    work     seconds of the same work where all answer at once
    chain    seconds of the sequence whose environment thinks longest, if it were alone
    apart    seconds where each sequence goes on as soon as it is answered, and the larger of work and chain, the
             bound, as a share of them
    price    seconds by the planner's formula, given the work, the thoughts, and what as many sequences alone take
             as are drawn on average (planner/pricing/call_formulas.py)
    lockstep the same where nobody goes on before all have been answered
    again    tokens that were read again, for each turn; new ones are 16

Medians over the rounds; the ways take turns.

With `--agents` so many programs ask through the endpoint, six times each, for 8 to 64 tokens (log-uniform), and
really sleep in between, log-uniformly from a tenth of `longest` seconds on. `turns`: their requests are turns of
one generation; `streams`: so, and each answer is streamed; `stops`: so, and each agent has a stop string of its own,
which ends nothing; `draws`: as engines beside the run are asked, those together that wait at the same time. All draw
the same tokens, but for rounding. `wall`: seconds; `cpu`: those of the rank, without endpoint and agents. Medians,
and what the rounds span.
"""

import random
import sys
import tempfile
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import LlamaForCausalLM

from bench.generation import CONFIG, PROMPT, Alone, prompts_of
from bench.harness import Spread, in_turn, options
from bench.models import build_engine
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import generate
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams
from prefect_rlhf.rlhf_tasks.parallel.generate.turns import Following, Turn, Turns
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from tests.rlhf_tasks.algorithms.one_rank import OneRank, runs_of_one
from tests.rlhf_tasks.test_environments import drawn, grpo_config
from tests.tiny_runs import write_model, write_prompts

TURNS, DRAWN, OBSERVED = 4, 16, 16
TOKENS = TURNS * (DRAWN + OBSERVED) - OBSERVED


def thoughts_s(sample: int, longest_s: float) -> list[float]:
    """Seconds that a sample's environment thinks after each turn; after the last one it need not."""
    draws = [random.Random(1000 * sample + number).random() for number in range(1, TURNS)]
    return [*(longest_s * 10**-draw for draw in draws), 0.0]


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

    def ended(self, sample: int, turn: Turn) -> None:
        number = self._turns[sample] = self._turns.get(sample, 0) + 1
        self._due_s[sample] = self.now_s + thoughts_s(sample, self._longest_s)[number - 1]

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


ASKS = """
import http.client, json, os, random, sys, time
row, longest_s, way = json.loads(sys.stdin.readline()), float(sys.argv[1]), sys.argv[2]
more = {"streams": {"stream": True}, "stops": {"stop": "|" * 9 + os.environ["AGENT_SEED"]}}.get(way, {})
chance = random.Random(int(os.environ["AGENT_SEED"]))
policy = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2])
text = row["prompt"]
for _ in range(6):
    body = json.dumps({"prompt": text, "max_tokens": int(8 * 2 ** (3 * chance.random())), **more})
    policy.request("POST", "/v1/completions", body, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    said = policy.getresponse().read().decode()
    events = said.split("data: ")[1:-1] if way == "streams" else [said]
    said = "".join(json.loads(each)["choices"][0]["text"] for each in events)
    text += said + f"<{chance.randrange(10**8):08}>"
    time.sleep(longest_s * 10 ** -chance.random())
print('{"reward": 1}')
"""


class Asked:
    """What a generate call with agents took: seconds of the wall, and of this process's CPU time."""

    def __init__(self, run: OneRank, agents: int, draws_turns: bool) -> None:
        run.generator.draws_turns = draws_turns
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        drawn(run, range(agents))
        self.wall_s, self.cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s


def with_agents(agents: int, rounds: int, longest: list[float]) -> None:
    """Print the table of agents."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_key_value_heads": 4}
    with tempfile.TemporaryDirectory() as name, runs_of_one(grpo_config, Path(name), Path(name)) as begin:
        folder = Path(name)
        write_model(folder / "actor", max_position_embeddings=2048, **sizes)
        write_prompts(folder / "prompts.jsonl")
        (folder / "agent.py").write_text(ASKS)
        for longest_s in longest:
            changes = {"environment": None, "batch_size": agents, "dtype": "float32"}
            changes |= {"sampling": {"max_completion_length": 1200}}
            ways = {}
            for way in ("turns", "streams", "stops", "draws"):
                command = f"{sys.executable} {folder}/agent.py {longest_s} {way}"
                run = begin(agent={"command": command, "at_once": agents}, **changes)
                ways[way] = partial(Asked, run, agents, way != "draws")
            took = in_turn(ways, rounds, warm_up=1)
            for way, of_way in took.items():
                wall, cpu = (
                    Spread.of([getattr(each, key) for each in of_way]) for key in ("wall_s", "cpu_s")
                )
                print(f"longest {longest_s:g} {way}: wall {wall}, cpu {cpu}", flush=True)


def main() -> None:
    """Print the table."""
    parser = options(__doc__)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--longest", type=float, nargs="+", default=[0.25, 1.0, 2.0])
    parser.add_argument("--agents", type=int)
    given = parser.parse_args()
    if given.agents:
        with_agents(given.agents, given.rounds, given.longest)
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    groups: Any = Alone()
    engine = build_engine(LlamaForCausalLM(CONFIG), groups)
    sequences = given.sequences
    alone_s = Work(engine, 1, 1, 0.0, False).seconds
    print(f"{sequences} sequences, {TURNS} turns of {DRAWN} tokens, {OBSERVED} observed between them")
    of_each = ("", "price", "again")
    heads = ("slots", "longest", "work", "chain", "apart", *of_each, "lockstep", *of_each)
    print(" ".join(f"{head:>8}" for head in heads))
    for micro_batches in given.micro_batches:
        for longest_s in given.longest:
            ways = {
                "work": partial(Work, engine, sequences, micro_batches, 0.0, False),
                "apart": partial(Work, engine, sequences, micro_batches, longest_s, False),
                "lockstep": partial(Work, engine, sequences, micro_batches, longest_s, True),
            }
            took = in_turn(ways, given.rounds)
            work_s, *found = (Spread.of([work.seconds for work in took[way]]).median for way in ways)
            slots = -(-sequences // micro_batches)
            thought = [thoughts_s(sample, longest_s) for sample in range(sequences)]
            chain_s = alone_s + max(map(sum, thought))
            drawn_s = work_s * slots / sequences
            beside = round(min(slots, sequences * drawn_s / (drawn_s + mean(map(sum, thought)))))
            beside_s = Work(engine, beside, 1, 0.0, False).seconds
            prices = (
                max(work_s, beside_s + max(map(sum, thought))),
                work_s + sum(max(of_turn[:slots]) for of_turn in zip(*thought, strict=True)),
            )
            print(f"{slots:8} {longest_s:8.2f} {work_s:8.2f} {chain_s:8.2f}", end="")
            for way, seconds, price_s in zip(("apart", "lockstep"), found, prices, strict=True):
                share, again = max(work_s, chain_s) / seconds, took[way][0].again
                print(f" {seconds:8.2f} {share:8.0%} {price_s:8.2f} {again:8.1f}", end="")
            print(flush=True)


if __name__ == "__main__":
    main()
