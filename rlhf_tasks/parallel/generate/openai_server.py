"""The `Generator` on a server that somebody else has started: OpenAI's completions, weights from a folder.

One server, or one address of several, draws for all replicas. So weights change for all at once: the first replica
writes them, when every replica has drawn what it had to, and the others wait for that.
"""

import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import broadcast_json
from prefect_rlhf.rlhf_tasks.parallel.generate.beside import SECONDS_A_TOKEN, STALL_S, GenerationFault
from prefect_rlhf.rlhf_tasks.parallel.generate.completions import NEVER, Answer, Completions
from prefect_rlhf.rlhf_tasks.parallel.generate.drawn import Request, requests_of, samples_of, sampling_of
from prefect_rlhf.rlhf_tasks.parallel.generate.generator import Order, Terms
from prefect_rlhf.rlhf_tasks.parallel.generate.handover import Handover
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import base_of, beside_weights
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.durable import replace_file

POLICY = "policy"  # begins the name of a folder in weights_dir
WEIGHTS = "weights-of-server"  # in the run folder: the path of the folder that the server was given last
AT_ONCE = 256  # requests of a replica
SEEDS = 2**31  # servers take fewer bits than ours have


class OpenAI:
    """A run's responses from a server.

    Its settings: `url`, `model`, `key` and `weights_dir`, which the server sees under the same path.
    """

    draws_turns = False

    def __init__(self, terms: Terms) -> None:
        settings = terms.settings
        self.version = -1
        self._terms = terms
        self._server = Completions(settings["url"], settings["model"], settings["key"], terms.patience)
        self._handover = Handover()
        self._engine: Engine | None = None
        self._name = ""  # of the weights that the server was given
        self._folder: Path | None = None  # that has them; of the first replica
        self._taken: tuple[int, int] | None = None

    def take(self, engine: Engine) -> None:
        """Write an engine's weights and have them loaded, unless the server has them. Collective over the mesh."""
        self._engine, self.version = engine, engine.version
        ours = (id(engine), engine.version)
        is_first = engine.is_head and engine.coordinate.dp == 0
        has = is_first and self._taken == ours and self._server.current() in (self._name, None)
        if self._said(engine, has):
            return
        self._taken = None
        handed = self._handover.write(engine) if engine.coordinate.dp == 0 else None
        if handed is not None:
            self._name = f"{engine.version}-{handed['digest']}"
            self._hand_over()
        self._name = self._said(engine, self._name)
        self._taken = ours

    def _said(self, engine: Engine, value: Any) -> Any:
        """What the first head has, on all ranks of the mesh."""
        mesh = tuple(sorted(engine.placement.devices))
        return broadcast_json(value, engine.placement.heads[0], engine.groups[mesh], engine.device)

    def _hand_over(self) -> None:
        """Have the server load what is handed over, from a folder in place of the last one. No other run has the same
        folder: the server must not load another's weights under this one's name."""
        before, base = self._folder or self._left(), base_of(self._terms.folder)
        self._folder = folder = Path(
            self._terms.settings["weights_dir"], f"{POLICY}-{self._name}-{uuid.uuid4().hex[:8]}"
        )
        try:
            if self._terms.run_folder is not None:
                replace_file(Path(self._terms.run_folder, WEIGHTS), str(folder))
            folder.mkdir(parents=True)
            for path in (base / "config.json", *beside_weights(base)):
                shutil.copy2(path, folder / path.name)
            save_file(dict(self._handover.tensors()), folder / "model.safetensors", {"format": "pt"})
            self._server.take(str(folder), self._name)
        finally:
            _remove(before)

    def _left(self) -> Path | None:
        """The folder that a process of this run wrote which was killed, so that it could not remove it."""
        if self._terms.run_folder is None:
            return None
        record = Path(self._terms.run_folder, WEIGHTS)
        folder = Path(record.read_text()) if record.exists() else None
        return folder if folder is not None and folder.name.startswith(f"{POLICY}-") else None

    def draw(self, batch: SampleBatch, order: Order) -> SampleBatch | None:
        """Ask for one response to each prompt. Collective over the replica: no rank is ahead of its head."""
        engine = self._engine
        assert engine is not None, "draw before take"
        assert order.segments is None, "the configuration refuses segments"
        drawn = None
        if engine.is_head:
            requests = requests_of(batch, order)
            answers = self._answers(engine, requests, order, batch.ids)
            drawn = samples_of(engine, batch, requests, answers, order)
        dp = engine.coordinate.dp
        replica = engine.groups[engine.placement.replica(dp)]
        broadcast_json(True, engine.placement.heads[dp], replica, engine.device)
        return drawn

    def _answers(
        self, engine: Engine, requests: Sequence[Request], order: Order, ids: Sequence[int]
    ) -> list[Answer]:
        if not requests:
            return []
        tokens, vocabulary = self._terms.tokens, engine.layout.shape.vocab
        beyond = () if tokens is None else range(tokens, vocabulary)
        sampling = sampling_of(order) | {"logit_bias": {str(token): NEVER for token in beyond} or None}
        pool = ThreadPoolExecutor(min(AT_ONCE, len(requests)), "completions")
        try:
            futures = [
                pool.submit(self._server.complete, prompt, seed % SEEDS, most, sampling)
                for prompt, seed, most in requests
            ]
            samples = dict(zip(futures, ids, strict=True))
            for future in self._as_they_end(futures, max(each.most for each in requests)):
                if order.on_ended is not None:
                    order.on_ended(samples[future], future.result()[0].tokens)
            answers = [future.result()[0] for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        most = vocabulary if tokens is None else tokens
        strange = next((token for answer in answers for token in answer.tokens if token >= most), None)
        if strange is not None:
            raise GenerationFault(
                f"{self._server.url} has drawn token {strange}, and the model has {most}: it is another model"
            )
        if (current := self._server.current()) not in (self._name, None):
            raise GenerationFault(
                f"{self._server.url} has weights {current}, and was given {self._name}: another user has changed them"
            )
        return answers

    def _as_they_end(self, futures: Sequence["Future[Any]"], most: int) -> Iterator["Future[Any]"]:
        """The requests as they end, until all have, or one has failed. Each that ends moves the deadline on."""
        within_s, pending = (STALL_S + most * SECONDS_A_TOKEN) * self._terms.patience, set(futures)
        while pending:
            done, pending = wait(pending, within_s, FIRST_COMPLETED)
            failed = next((future for future in done if future.exception() is not None), None)
            if failed is not None or not done:
                self._server.abort()
            if failed is not None:
                failed.result()
            if not done:
                raise GenerationFault(f"{self._server.url} has ended no response for {within_s:.0f} s")
            yield from done

    def free(self) -> None:
        """Its memory is not ours."""

    def abort(self) -> None:
        """End all requests: what waits for them raises."""
        self._server.abort()

    def close(self) -> None:
        """Let go of the memory and the folder of the weights. The server runs on."""
        self._server.abort()
        self._handover.close()
        _remove(self._folder)


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
