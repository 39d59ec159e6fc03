"""Generators that are none of ours: one in this process, and a process that speaks the messages of vLLM's."""

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.shared_weights import assembled, digests_of, parts_of
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order, Terms
from prefect_rlhf.rlhf_tasks.parallel.generate.vllm_process import Vllm
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.child_pipes import Requests
from prefect_rlhf.rlhf_tasks.system.counter_random import counter_bits

LENGTH = 5
MODE = "RLHF_TEST_FAKE_VLLM"


class Uniform:
    """Draws LENGTH tokens of equal probability, whatever the weights are."""

    draws_turns = False

    def __init__(self, terms: Terms) -> None:
        assert terms.tokens is not None
        self.version, self._tokens, self._engine = -1, terms.tokens, None
        self.log: list[Any] = []

    def take(self, engine: Engine) -> None:
        self.version, self._engine = engine.version, engine
        self.log.append(("take", engine.version))

    def draw(self, batch: SampleBatch, order: Order) -> SampleBatch | None:
        assert self._engine is not None
        if not self._engine.is_head:
            return None
        self.log.append(("draw", order.iteration))
        parts: dict[str, list[torch.Tensor]] = {
            key: [] for key in ("input_ids", "response_mask", "old_logprobs", "truncated")
        }
        for sample, prompt in zip(batch.ids, batch["prompt_ids"].split(), strict=True):
            bits = counter_bits(
                order.seed, order.purpose, order.iteration, torch.tensor([sample]), torch.arange(LENGTH)
            )
            none = torch.zeros(len(prompt), dtype=self._engine.dtype_of_rows)
            parts["input_ids"].append(torch.cat([prompt, bits % self._tokens]))
            parts["response_mask"].append(torch.cat([none.bool(), torch.ones(LENGTH, dtype=torch.bool)]))
            likely = none.new_full((LENGTH,), -math.log(self._tokens))
            parts["old_logprobs"].append(torch.cat([none, likely]))
            parts["truncated"].append(torch.tensor([True]))
        return SampleBatch(batch.ids, {key: Packed.of(of) for key, of in parts.items()})

    def free(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None:
        self.log.append("close")


class Restless(Uniform):
    """Never draws the same tokens twice."""

    def draw(self, batch: SampleBatch, order: Order) -> SampleBatch | None:
        return super().draw(batch, order._replace(seed=int.from_bytes(os.urandom(4), "little")))


class FakeVllm(Vllm):
    """The generator of vLLM on a process of `serve` below."""

    serve = f"{__name__}:serve"

    def __init__(self, terms: Terms) -> None:
        os.environ["RLHF_TEST_PYTHON"] = sys.executable
        python = str(Path(__file__).parent / "python_with_tests.sh")
        super().__init__(terms._replace(settings={**terms.settings, "python": python}))


def serve() -> None:
    """vLLM's messages without vLLM: tokens follow from a request's seed. MODE says how it misbehaves, or names the
    file that is there once it has slept, and with the suffix .read once it has weights."""
    requests, mode, sum_of_bits = Requests(), os.environ.get(MODE, ""), 0
    lines = iter(requests)
    begin = next(lines)
    requests.reply({"vllm": "fake", "torch": torch.__version__})
    for request in lines:
        ((what, value),) = request.items()
        if what == "take":
            if mode.startswith("/"):
                time.sleep(0.3)  # reading takes a while
                Path(mode).with_suffix(".read").touch()
            parts = parts_of(value)
            if mode == "digest":
                (_, part), *_ = list(parts.values())[1]
                part.view(-1).view(torch.uint8)[-1] ^= 1
            tensors = assembled(parts, value["shapes"], torch.device("cpu"))
            sum_of_bits = int(sum(t.view(torch.int32).long().sum() for _, t in tensors))
            version = value["version"] - (mode == "version")
            requests.reply({"version": version, "digests": digests_of(parts)})
            continue
        if what == "sleep":
            time.sleep(0.3)  # freeing takes a while
            Path(mode).touch()
            requests.reply({})
            continue
        assert value["requests"], "vLLM is not asked for nothing"
        if mode == "hang":
            time.sleep(3600)
        while mode == "idle":
            requests.reply({"drawn": 1})
            time.sleep(0.2)
        if mode == "end":
            os._exit(3)
        if mode == "fault":
            requests.reply({"fault": "ValueError: as asked", "traceback": "at line 1"})
            return
        requests.reply({"drawn": 1})
        answers = []
        for _, seed, most in value["requests"]:
            ids = [(seed + sum_of_bits + 31 * place) % begin["tokens"] for place in range(min(most, LENGTH))]
            answers.append([ids, [-1.0] * len(ids), "length" if most <= LENGTH else "stop"])
        requests.reply({"answers": answers})
