"""Generation: one decode loop for any (dp, tp, pp), with a static KV cache, on packed prompts.

The sequences of a dp rank are decoded in groups. A pipeline stage takes the groups in turn, so with as many groups
as stages none idles: while stage 1 computes group 0, stage 0 computes group 1. Hidden states are sent to the next
stage point to point; the last stage samples and broadcasts the tokens over the pipeline. Each stage thus knows every
token before it computes the next one. From the tokens alone each stage derives which sequences have finished and
which shapes come next, so no other communication is needed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_tasks.parallel.batch.micro_batch import MicroBatch, balance, micro_batch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.generate.decode_graph import DecodeGraphs
from rlhf_tasks.parallel.generate.kv_cache import KVCache, vacate
from rlhf_tasks.parallel.generate.packed_weights import PackedWeights, can_pack
from rlhf_tasks.parallel.generate.sampling import SamplingParams, sample, uniform
from rlhf_tasks.parallel.generate.stage_messages import Relay
from rlhf_tasks.parallel.generate.stop_strings import follow
from rlhf_tasks.parallel.layout.flops import generation_flops
from rlhf_tasks.parallel.train.engine import Engine
from rlhf_tasks.system.failpoints import Point, reach

PACK_FROM_STEPS = 12  # packing the weights costs about what it saves in 5 steps


@dataclass(frozen=True, slots=True)
class Pace:
    """Decoding settings of a kind of device.

    check_every    steps between checks for finished sequences; each check synchronises with the device
    span_multiple  reads of the cache are rounded to a multiple of this many columns
    graphs         whether steps are captured as CUDA graphs
    """

    check_every: int
    span_multiple: int
    graphs: bool


PACES = {"cpu": Pace(1, 1, graphs=False), "cuda": Pace(16, 256, graphs=True)}


@torch.inference_mode()
def generate(
    engine: Engine,
    batch: SampleBatch,
    params: SamplingParams,
    seed: int,
    iteration: int,
    purpose: str = "rollout",
    groups_in_flight: int | None = None,
    record_kept: bool = False,
) -> SampleBatch | None:
    """Sample one response per prompt. All ranks of a replica (one dp rank) call it together.

    batch             this dp rank's samples, with the key `prompt_ids`; no prompt may be empty, the batch may be
    seed, iteration, purpose  together with sample id and position, they determine the random number of each token
    groups_in_flight  groups into which the batch is cut; None: one per pipeline stage
    record_kept       also record which tokens top-k and top-p kept, for each token of a response

    Returns None, except on the head: there the samples with these keys, L being the tokens of a sample:
        input_ids      [L] int64: prompt and response; the response includes the token that ended it
        response_mask  [L] bool: True on the response
        old_logprobs   [L] float32 (float64 in float64 runs): under the distribution drawn from; 0 on the prompt
        truncated      [1] bool: the response reached max_new_tokens without a stop id or a stop string
    with record_kept also
        kept_counts    [L] int32: how many tokens could be drawn; 0 on the prompt
        kept_tokens    [sum(kept_counts)] int32: their ids, position after position
    Layout and batch influence tokens only by rounding: a token can differ where its uniform random number is within
    rounding error of the border between two tokens. Raises ValueError for an empty prompt and, on the last stage, for
    logits that are not finite.
    """
    empty = [i for i, n in zip(batch.ids, batch["prompt_ids"].lengths, strict=True) if n == 0]
    if empty:
        raise ValueError(f"samples {empty[:4]} have empty prompts: there is nothing to predict from.")
    with _multiplication(engine, params):
        prompts = SampleBatch(batch.ids, {"input_ids": batch["prompt_ids"].to(engine.device)})
        parts = balance(prompts["input_ids"].lengths, groups_in_flight or engine.placement.strategy.pp)
        shares = [prompts.take(part) for part in parts]
        randomness = (seed, purpose, iteration)
        groups = [_Group(engine, share, params, randomness, record_kept) for share in shares]
        _decode(groups, params.max_new_tokens)
    if not engine.is_head:
        return None
    answered = _assemble(batch, groups, engine.stage.dtype, record_kept)
    lengths = answered["input_ids"].lengths
    new_tokens = sum(lengths) - sum(batch["prompt_ids"].lengths)
    engine.count(generation_flops(engine.layout.shape, lengths, new_tokens, engine.layout.lora))
    return answered


def _multiplication(engine: Engine, params: SamplingParams) -> AbstractContextManager:
    """The context for matrix products: packed weights, if they are possible and the steps are enough to save time."""
    stage = engine.stage
    pays = params.max_new_tokens >= PACK_FROM_STEPS and can_pack(stage.device, stage.dtype)
    return PackedWeights() if pays else nullcontext()


def _decode(groups: Sequence["_Group"], max_new_tokens: int) -> None:
    """The decode loop, until all groups are done."""
    active = groups
    for step in range(max_new_tokens):
        for group in active:
            if step > 0:
                group.settle()
            if not group.done:
                group.compute()
        reach(Point.GENERATION)
        active = [group for group in active if not group.done]
    for group in active:
        group.settle()


class _Group:
    """One rank's state of a group: sequences that are decoded together, one token each per step.

    A *row* is an index into the current batch; `_order[row]` is the number of its sequence in the group.

    done  whether all sequences have finished
    """

    def __init__(
        self,
        engine: Engine,
        prompts: SampleBatch,
        params: SamplingParams,
        randomness: tuple[int, str, int],
        record_kept: bool,
    ) -> None:
        device, lengths = engine.device, prompts["input_ids"].lengths
        pace = PACES[device.type]
        self.done = False
        self._prompts, self._params, self._stage, self._relay = prompts, params, engine.stage, Relay(engine)
        self._check_every = pace.check_every
        self._cache = KVCache(lengths, params.max_new_tokens - 1, device, pace.span_multiple)
        self._graphs = DecodeGraphs(self._stage, self._cache) if pace.graphs else None
        self._step = -1  # number of the last response token computed
        self._stops = torch.tensor(params.stop_ids, dtype=torch.int64, device=device)
        self._strings = params.stop_strings and params.stop_strings.to(device)
        # One entry per row:
        self._order = torch.arange(len(lengths), device=device)
        self._positions = torch.tensor(lengths, device=device)  # of the response's first token
        self._finished = torch.zeros(len(lengths), dtype=torch.bool, device=device)
        self._matched = torch.zeros(len(lengths), dtype=torch.int64, device=device)  # states of stop strings
        # One entry per sequence:
        self._lengths = torch.full((len(lengths),), params.max_new_tokens, device=device)  # of its response
        self._truncated = torch.ones(len(lengths), dtype=torch.bool, device=device)
        # One entry per sequence and step:
        ids, steps = (
            torch.tensor(prompts.ids, device=device),
            torch.arange(params.max_new_tokens, device=device),
        )
        self._uniforms = uniform(*randomness, ids[:, None], self._positions[:, None] + steps)
        self._tokens = torch.zeros(self._uniforms.shape, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros_like(self._uniforms)
        self._kept: list[list[Tensor]] | None = [[] for _ in lengths] if record_kept else None

    def compute(self) -> None:
        """Run this rank's stage for the next step: on the prompts at first, then on each row's newest token."""
        self._step += 1
        output = self._prefill() if self._step == 0 else self._decode()
        if not self._relay.is_last_stage:
            self._relay.send_hidden(output)
            return
        logits = self._relay.gather_vocabulary(output)
        uniforms = self._uniforms[self._order, self._step]
        drawn = sample(logits, self._params, uniforms, self._step)
        self._logprobs[self._order, self._step] = drawn.logprobs
        if self._kept is not None:
            kept = drawn.scores.isfinite()
            tokens = kept.nonzero()[:, 1].to("cpu", torch.int32).split(kept.sum(1).tolist())
            for place, of_row in zip(self._order.tolist(), tokens, strict=True):
                self._kept[place].append(of_row)
        self._relay.share_tokens(drawn.tokens)

    def _prefill(self) -> Tensor:
        micro = micro_batch(self._prompts)
        self._cache.prefill(range(self._cache.rows))
        x = micro.input_ids if self._relay.is_first_stage else self._relay.receive_hidden(micro.tokens)
        return self._stage(x, micro, self._cache, micro.cu_seqlens[1:].long() - 1)

    def _decode(self) -> Tensor:
        self._cache.advance()
        rows, tokens = self._cache.rows, self._tokens[self._order, self._step - 1]
        micro = MicroBatch(
            input_ids=tokens,
            cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=tokens.device),
            position_ids=self._positions + (self._step - 1),
            ids=self._prompts.ids[:rows],
            lengths=(1,) * rows,
            data={},
        )
        x = tokens if self._relay.is_first_stage else self._relay.receive_hidden(rows)
        return self._stage(x, micro, self._cache) if self._graphs is None else self._graphs.run(x, micro)

    def settle(self) -> None:
        """Store the tokens drawn in the last step, and remove finished sequences from the batch."""
        tokens = self._relay.receive_tokens(self._cache.rows)
        self._tokens[self._order, self._step] = tokens
        ends = torch.isin(tokens, self._stops)
        if self._strings is not None:
            self._matched, completed = follow(self._strings, self._matched, tokens)
            if self._step >= self._params.min_new_tokens:
                ends |= completed
        ends &= ~self._finished
        self._finished |= ends
        self._truncated[self._order] &= ~ends
        self._lengths[self._order] = self._lengths[self._order].where(~ends, self._step + 1)
        if (self._step + 1) % self._check_every == 0:
            self._refuse_unsound_logits()
            self._drop_finished(self._finished.tolist())

    def _refuse_unsound_logits(self) -> None:
        """Raises ValueError, naming sample and position, if a token since the last check was drawn from logits that
        are not finite: that token and all later ones are meaningless."""
        first = max(0, self._step + 1 - self._check_every)
        unsound = self._logprobs[:, first : self._step + 1].isnan().nonzero().tolist()
        if unsound:
            place, step = min(unsound, key=lambda found: found[1])
            position = self._prompts["input_ids"].lengths[place] + first + step
            raise ValueError(
                f"generate: logits are not finite at position {position} of sample {self._prompts.ids[place]} "
                f"(token {first + step} of its response). The model's weights, or what it computes in "
                f"{self._stage.dtype}, hold NaN or infinity: check its weights, or lower the learning rate."
            )

    def _drop_finished(self, finished: list[bool]) -> None:
        remaining = finished.count(False)
        self.done = remaining == 0
        size = remaining if self._graphs is None else DecodeGraphs.rows_for(remaining)
        if self.done or size >= len(finished):
            return
        rows = vacate(finished, size)
        self._cache.keep(rows)
        kept = torch.tensor(rows, device=self._order.device)
        self._order, self._positions = self._order[kept], self._positions[kept]
        self._finished, self._matched = self._finished[kept], self._matched[kept]

    def samples(self) -> dict[int, dict[str, Tensor]]:
        """Sample id -> key -> data, as `generate` returns them, on the CPU. Only for the last stage."""
        self._refuse_unsound_logits()
        lengths, truncated = self._lengths.tolist(), self._truncated.cpu()
        dtype = torch.promote_types(self._stage.dtype, torch.float32)
        responses, logprobs = self._tokens.cpu(), self._logprobs.to("cpu", dtype)
        prompts = self._prompts["input_ids"].split()
        found = {}
        for i, (sample_id, length) in enumerate(zip(self._prompts.ids, lengths, strict=True)):
            prompt = prompts[i].cpu()
            found[sample_id] = {
                "input_ids": torch.cat([prompt, responses[i, :length]]),
                "response_mask": torch.arange(len(prompt) + length) >= len(prompt),
                "old_logprobs": torch.cat([logprobs.new_zeros(len(prompt)), logprobs[i, :length]]),
                "truncated": truncated[i : i + 1],
            }
            if self._kept is not None:
                kept = self._kept[i][:length]
                counts = [0] * len(prompt) + [len(tokens) for tokens in kept]
                found[sample_id]["kept_counts"] = torch.tensor(counts, dtype=torch.int32)
                found[sample_id]["kept_tokens"] = torch.cat(kept)
        return found


def _assemble(
    batch: SampleBatch, groups: Sequence[_Group], dtype: torch.dtype, record_kept: bool
) -> SampleBatch:
    """The samples of all groups in the batch's order, on the batch's device."""
    samples = {sample_id: data for group in groups for sample_id, data in group.samples().items()}
    device = batch["prompt_ids"].values.device
    empty = {
        "input_ids": torch.empty(0, dtype=torch.int64),
        "response_mask": torch.empty(0, dtype=torch.bool),
        "old_logprobs": torch.empty(0, dtype=torch.promote_types(dtype, torch.float32)),
        "truncated": torch.empty(0, dtype=torch.bool),
    }
    if record_kept:
        empty |= {key: torch.empty(0, dtype=torch.int32) for key in ("kept_counts", "kept_tokens")}
    data = {}
    for key, nothing in empty.items():
        parts = [samples[sample_id][key] for sample_id in batch.ids]
        lengths = tuple(len(part) for part in parts)
        data[key] = Packed(torch.cat([nothing, *parts]).to(device), lengths)
    return SampleBatch(batch.ids, data)
