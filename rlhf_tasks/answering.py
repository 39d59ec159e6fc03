"""A model's folder on one device of this machine, which answers prompts: what `chat` and `generate` do.

The engine is that of runs, so a seed gives the tokens that a run would draw, and whatever trains can be tried.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from prefect_rlhf.rlhf_tasks.data.tokenizer import NO_CHARACTER, Tokenizer
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets, join_world, leave_world
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import generate, stream
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import check_weights, read_shape
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import load, load_config
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.rank_process import OutOfMemory, told_when_out
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError

ALONE = Placement((0,), ParallelStrategy())
TIMEOUT_S = 60.0  # of collectives: there is nobody to wait for


@dataclass(frozen=True)
class Drawn:
    """How answers are drawn; temperature 0 takes the likeliest tokens."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


class AnsweringModel:
    """A language model on the first GPU that is visible, else on the CPU. A folder of an adapter is its model with
    the adapter added. `close` it: a process holds one at a time.

    context  most tokens of a prompt and its answer
    Raises ConfigError where the folder holds no model, or none that gives text.
    """

    def __init__(self, folder: Path) -> None:
        shape, described = read_shape(folder), load_config(folder)
        if any("SequenceClassification" in name for name in described.architectures or ()):
            raise ConfigError(f"{folder} holds a reward model, which gives no text. Name a language model.")
        self.tokenizer = Tokenizer.from_folder(folder)
        self.context = shape.context
        self._layout = Layout(shape, "lm", ALONE)
        check_weights(folder, self._layout.parameters, needs_head=True)
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        join_world(dist.HashStore(), 0, 1, TIMEOUT_S, self._device)
        try:
            groups = ProcessGroups(device_sets(ALONE), TIMEOUT_S, self._device)
            with _in_memory(self._device):
                stage = Stage(
                    described,
                    self._layout,
                    ALONE.coordinate(0),
                    groups[(0,)],
                    device=self._device,
                    dtype=dtype,
                )
                load(stage, folder, seed=0)
            self._engine = Engine(stage, self._layout, groups, tokens=self.tokenizer.size)
        except BaseException:
            leave_world()
            raise

    def close(self) -> None:
        """Leave the world of ranks, so that this process can hold another model."""
        leave_world()

    def stream(self, prompt_ids: Sequence[int], drawn: Drawn) -> Iterator[str]:
        """The text of an answer, piece by piece; special tokens are left out. Raises ConfigError where the prompt
        leaves no room."""
        params, ids, text = self._params(len(prompt_ids), drawn), list[int](), ""
        with _in_memory(self._device):
            for token in stream(self._engine, prompt_ids, params, drawn.seed):
                ids.append(token)
                whole = self.tokenizer.decode(ids)
                # The last bytes may be the beginning of a character.
                if not whole.endswith(NO_CHARACTER) and whole.startswith(text):
                    yield whole[len(text) :]
                    text = whole
        yield self.tokenizer.decode(ids)[len(text) :]

    def answers(self, prompts: Sequence[Sequence[int]], first: int, drawn: Drawn) -> Iterable[str]:
        """The answers to prompts as token ids, which are drawn together.

        first  the number of the first one: with the seed it says which random numbers an answer has
        """
        longest = max(map(len, prompts))
        ids = tuple(range(first, first + len(prompts)))
        rows = Packed.of([torch.tensor(list(prompt), dtype=torch.int64) for prompt in prompts])
        batch = SampleBatch(ids, {"prompt_ids": rows}).to(self._device)
        with _in_memory(self._device):
            answered = generate(self._engine, batch, self._params(longest, drawn), drawn.seed, iteration=0)
        assert answered is not None, "the only rank is the head"
        for row, prompt in zip(answered["input_ids"].split(), prompts, strict=True):
            yield self.tokenizer.decode(row[len(prompt) :].tolist())

    def _params(self, prompt_tokens: int, drawn: Drawn) -> SamplingParams:
        room = self.context - prompt_tokens
        if room < 1:
            raise ConfigError(
                f"the prompt has {prompt_tokens:,} tokens, and the model's context {self.context:,}. Shorten it."
            )
        return SamplingParams(
            max_new_tokens=min(drawn.max_new_tokens, room),
            temperature=drawn.temperature,
            top_p=drawn.top_p,
            stop_ids=self.tokenizer.stop_ids,
        )


@contextmanager
def _in_memory(device: torch.device) -> Iterator[None]:
    try:
        with told_when_out("the model", device):
            yield
    except OutOfMemory:
        raise ConfigError(
            f"the model, its prompt and its answer take more memory than {device} has. Ask for fewer new tokens, or "
            "name a smaller model."
        ) from None
