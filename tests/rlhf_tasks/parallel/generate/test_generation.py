"""Generation against plain transformers, against itself without a cache, and over every (dp, tp, pp)."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch, micro_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.generate import slots
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import Segments, generate
from prefect_rlhf.rlhf_tasks.parallel.generate.kv_cache import KVCache
from prefect_rlhf.rlhf_tasks.parallel.generate.places import MOST
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams, StopStrings, TokenTexts
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.work import ROWS_OF_SLOT, blocks_of, generation_flops
from prefect_rlhf.rlhf_tasks.parallel.model.logprobs import Vocabulary, packed_logprobs
from prefect_rlhf.rlhf_tasks.parallel.model.stage import ROWS, Stage
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from tests.tiny_models import CONFIGS, fill, shape_of, tiny_config, tiny_model

CPU = torch.device("cpu")
ALONE = ParallelStrategy()
STRATEGIES = [
    ParallelStrategy(dp, tp, pp)
    for dp, tp, pp in itertools.product((1, 2, 4), repeat=3)
    if dp * tp * pp in (2, 4)
]
LENGTHS = (3, 9, 1, 6, 4, 5, 2)
STOPS = tuple(range(8))  # of 61 tokens
TEXTS = [chr(ord("a") + token % 5).encode() for token in range(61)]
STRINGS = ("ab", "cec")
WHOLE = Vocabulary((61,))


class Alone:
    """The process groups of a world of one rank, which needs none."""

    rank = 0

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    def __getitem__(self, devices: Iterable[int]) -> None:
        return None


def build(
    family: str,
    dtype: torch.dtype,
    strategy=ALONE,
    groups: Any = None,
    tokens: int | None = None,
    **sizes: Any,
) -> Engine:
    """An engine of a tiny model whose weights are the same for every strategy. tokens: those of its tokenizer."""
    groups = groups or Alone()
    config = tiny_config(family, **sizes)
    placement = Placement(tuple(range(strategy.size)), strategy)
    layout = Layout(shape_of(config), "lm", placement)
    tp_group = groups[placement.tp_group(groups.rank)]
    stage = Stage(
        config, layout, placement.coordinate(groups.rank), tp_group, device=groups.device, dtype=dtype
    )
    fill(stage, tiny_model(config))
    return Engine(stage, layout, groups, tokens=tokens)


def prompts(lengths=LENGTHS, first_id: int = 10) -> SampleBatch:
    generator = torch.Generator().manual_seed(1)
    vocab = tiny_config("llama").vocab_size
    parts = [torch.randint(vocab, (length,), generator=generator) for length in lengths]
    return SampleBatch(tuple(range(first_id, first_id + len(parts))), {"prompt_ids": Packed.of(parts)})


def responses(samples: SampleBatch) -> dict[int, list[int]]:
    """Sample id -> response tokens."""
    parts = zip(samples["input_ids"].split(), samples["response_mask"].split(), strict=True)
    return {i: tokens[mask].tolist() for i, (tokens, mask) in zip(samples.ids, parts, strict=True)}


OF_GENERATE = ("groups_in_flight", "record_kept", "micro_batches", "prefill_tokens", "segments", "on_ended")


def draw(engine: Engine, batch: SampleBatch, seed: int = 7, iteration: int = 2, **options: Any) -> Any:
    """options: of `generate`, and parameters of sampling."""
    given = {name: options.pop(name) for name in OF_GENERATE if name in options}
    return generate(engine, batch, SamplingParams(**options), seed, iteration, **given)


def watched(engine: Engine, see: Callable[..., Any]) -> list[Any]:
    """What `see` gives for the arguments of each pass of the stage: (x, micro-batch, cache), of a pass over prompts
    also which rows pass the head: none."""
    seen = []
    engine.stage.register_forward_hook(lambda _, args, output: seen.append(see(*args)))
    return seen


def tokens_of_prompts(x: Tensor, micro: MicroBatch, cache: KVCache, *prompts: Tensor) -> int:
    return len(x) if prompts else 0


# One rank


@pytest.mark.parametrize(
    "family",
    [
        name
        if name in ("llama", "gemma2", "gemma4_text", "mixtral", "gpt2", "lfm2", "qwen3_5_text")
        else pytest.param(name, marks=pytest.mark.whole)
        for name in CONFIGS
    ],
)
def test_greedy_tokens_equal_transformers(family: str):
    batch = prompts()
    ours = responses(draw(build(family, torch.float32), batch, max_new_tokens=12, temperature=0.0))
    model = tiny_model(tiny_config(family))
    for sample_id, prompt in zip(batch.ids, batch["prompt_ids"].split(), strict=True):
        theirs = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=False, eos_token_id=None,
            pad_token_id=0, max_new_tokens=12,
        )  # fmt: skip
        assert ours[sample_id] == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "gpt2"])
@pytest.mark.parametrize(
    "temperature", [0.7, *(pytest.param(t, marks=pytest.mark.whole) for t in (0.0, 1.0))]
)
def test_logprobs_equal_those_of_a_full_forward(family: str, temperature: float):
    engine = build(family, torch.float32)
    samples = draw(engine, prompts(), max_new_tokens=20, temperature=temperature)
    micro = micro_batch(samples)
    with torch.no_grad():
        logits = engine.stage(micro.input_ids, micro)
    expected = packed_logprobs(logits, micro, WHOLE, temperature or 1.0)
    mask = samples["response_mask"].values
    ours = samples["old_logprobs"].values
    assert ours.dtype == torch.float32
    assert float(ours[~mask].abs().max()) == 0
    torch.testing.assert_close(ours[mask], expected[mask], atol=1e-5, rtol=1e-5)
    if temperature == 0:
        predicted = torch.cat([logits.new_zeros(1, dtype=torch.int64), logits.argmax(-1)[:-1]])
        assert torch.equal(predicted[mask], micro.input_ids[mask])


@pytest.mark.parametrize(
    "way",
    [
        {"temperature": 0.0},
        {"temperature": 1.5},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_new_tokens": 3, "stop_ids": STOPS},
    ],
    ids=str,
)
def test_tokens_that_the_tokenizer_lacks_are_neither_drawn_nor_counted(way: dict[str, Any]):
    """A vocabulary that is padded, and tied: its further embeddings may have any logits."""
    engine = build("llama", torch.float64, tie_word_embeddings=True, tokens=20)
    samples = draw(engine, prompts(), max_new_tokens=16, record_kept="temperature" not in way, **way)
    samples = SampleBatch(
        samples.ids, {k: Packed(p.values.clone(), p.lengths) for k, p in samples.data.items()}
    )
    drawn, micro = responses(samples), micro_batch(samples)
    assert max(max(response) for response in drawn.values()) < 20
    logits = engine.stage(micro.input_ids, micro).detach().requires_grad_()
    again, entropy = engine.logprobs_and_entropy(logits, micro, way.get("temperature") or 1.0)
    mask = samples["response_mask"].values
    torch.testing.assert_close(again[mask], samples["old_logprobs"].values[mask], atol=1e-9, rtol=0)
    (again[mask].sum() + entropy[mask].sum()).backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[:, 20:].any()
    over_all = packed_logprobs(logits, micro, WHOLE, way.get("temperature") or 1.0)
    assert "kept_counts" in samples.data or (over_all < again - 1e-3)[mask].any()


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"top_k": 20, "top_p": 0.8},
        {"min_new_tokens": 3},
        {"min_new_tokens": 3, "top_p": 0.8},
    ],
    ids=str,
)
def test_what_could_be_drawn_gives_the_logprobs_again(cut: dict[str, Any]):
    engine = build("llama", torch.float64)
    options = {"max_new_tokens": 16, "stop_ids": STOPS, "temperature": 1.5, **cut}
    samples = draw(engine, prompts(), groups_in_flight=2, record_kept=True, **options)
    assert "kept_tokens" not in draw(engine, prompts(), **options).data
    mask, counts = samples["response_mask"].values, samples["kept_counts"].values
    assert not counts[~mask].any()
    assert int(counts.max()) <= cut.get("top_k", 30)
    early = samples["response_mask"].split()[0].nonzero()[:3, 0]
    if cut == {"min_new_tokens": 3}:
        assert samples["kept_counts"].split()[0][early].tolist() == [-len(STOPS)] * 3
        assert samples["kept_tokens"].split()[0].tolist() == [*STOPS] * 3
    assert len({len(response) for response in responses(samples).values()}) > 2
    micro = micro_batch(samples)
    with torch.no_grad():
        logits = engine.stage(micro.input_ids, micro)
    again = packed_logprobs(logits, micro, WHOLE, 1.5)
    torch.testing.assert_close(again[mask], samples["old_logprobs"].values[mask], atol=1e-9, rtol=0)
    plain = micro_batch(SampleBatch(samples.ids, {"input_ids": samples["input_ids"]}))
    assert (packed_logprobs(logits, plain, WHOLE, 1.5) < again - 1e-3)[mask & (counts != 0)].any()


def test_a_sliding_window_holds_while_decoding():
    engine = build("mistral", torch.float32, sliding_window=4)
    samples = draw(engine, prompts(), max_new_tokens=12, temperature=0.0)
    micro = micro_batch(samples)
    with torch.no_grad():
        predicted = engine.stage(micro.input_ids, micro).argmax(-1)
    mask = samples["response_mask"].values
    assert torch.equal(predicted.roll(1)[mask], micro.input_ids[mask])
    no_window = build("mistral", torch.float32, sliding_window=None)
    assert responses(draw(no_window, prompts(), max_new_tokens=12, temperature=0.0)) != responses(samples)


def test_tokens_do_not_depend_on_the_batch():
    engine, batch = build("llama", torch.float64), prompts()
    together = responses(draw(engine, batch, max_new_tokens=16, stop_ids=STOPS))
    assert len({len(r) for r in together.values()}) > 2, "sequences of different lengths make the test"
    for sample_id in batch.ids:
        alone = responses(draw(engine, batch.reorder([sample_id]), max_new_tokens=16, stop_ids=STOPS))
        assert alone == {sample_id: together[sample_id]}
    reverse = draw(
        engine, batch.reorder(batch.ids[::-1]), max_new_tokens=16, stop_ids=STOPS, groups_in_flight=3
    )
    assert reverse.ids == batch.ids[::-1]
    assert responses(reverse) == together


def test_each_response_has_at_most_its_own_tokens():
    engine, batch = build("llama", torch.float64), prompts()
    whole = responses(draw(engine, batch, max_new_tokens=16, stop_ids=STOPS))
    mosts = torch.tensor([1 + 3 * (place % 6) for place in range(len(batch))])
    own = SampleBatch(batch.ids, {**batch.data, MOST: Packed(mosts, (1,) * len(batch))})
    samples = draw(engine, own, max_new_tokens=16, stop_ids=STOPS, groups_in_flight=2)
    assert responses(samples) == {
        sample: whole[sample][:most] for sample, most in zip(batch.ids, mosts.tolist(), strict=True)
    }
    ends = [response[-1] in STOPS for response in responses(samples).values()]
    assert samples["truncated"].values.tolist() == [not end for end in ends]


def test_seed_and_iteration_change_the_tokens():
    engine, batch = build("llama", torch.float32), prompts()
    base = responses(draw(engine, batch, max_new_tokens=16))
    assert responses(draw(engine, batch, max_new_tokens=16)) == base
    assert responses(draw(engine, batch, max_new_tokens=16, seed=8)) != base
    assert responses(draw(engine, batch, max_new_tokens=16, iteration=3)) != base


def test_stop_ids_end_a_response_and_belong_to_it():
    batch = prompts((2,) * 40)
    samples = draw(build("llama", torch.float32), batch, max_new_tokens=10, min_new_tokens=3, stop_ids=STOPS)
    assert samples.ids == batch.ids
    truncated = dict(zip(samples.ids, samples["truncated"].values.tolist(), strict=True))
    lengths = set()
    for sample_id, response in responses(samples).items():
        assert not set(response[:-1]) & set(STOPS)
        assert (response[-1] in STOPS) == (not truncated[sample_id])
        assert 4 <= len(response) <= 10, "a stop id comes after at least min_new_tokens others"
        assert truncated[sample_id] <= (len(response) == 10)
        lengths.add(len(response))
    assert len(lengths) > 3
    assert {True, False} == set(truncated.values())
    for prompt, tokens in zip(batch["prompt_ids"].split(), samples["input_ids"].split(), strict=True):
        assert torch.equal(tokens[: len(prompt)], prompt)


@pytest.mark.parametrize("min_new_tokens", [0, 4])
def test_stop_strings_end_a_response_with_the_token_that_completes_one(min_new_tokens: int):
    options = {"max_new_tokens": 24, "min_new_tokens": min_new_tokens}
    engine, batch = build("llama", torch.float64), prompts((2,) * 40)
    whole = responses(draw(engine, batch, **options))
    samples = draw(engine, batch, stop_strings=StopStrings(STRINGS, TokenTexts(TEXTS)), **options)
    truncated = dict(zip(samples.ids, samples["truncated"].values.tolist(), strict=True))
    for sample_id, response in responses(samples).items():
        text = b"".join(TEXTS[token] for token in whole[sample_id]).decode()
        ends = [
            end
            for end in range(min_new_tokens + 1, 25)
            if any(text[:end].endswith(string) for string in STRINGS)
        ]
        assert response == whole[sample_id][: min(ends, default=24)]
        assert truncated[sample_id] == (not ends)
    assert {True, False} == set(truncated.values())


def test_work_is_counted_of_the_tokens_that_came():
    engine, batch = build("llama", torch.float32), prompts()
    samples = draw(engine, batch, max_new_tokens=9, stop_ids=STOPS)
    lengths, new_tokens = samples["input_ids"].lengths, int(samples["response_mask"].values.sum())
    assert new_tokens < 9 * len(LENGTHS), "some end early"
    assert engine.flops == generation_flops(engine.layout.shape, lengths, new_tokens) > 0


def test_one_new_token_and_no_samples():
    engine = build("llama", torch.float32)
    assert {len(r) for r in responses(draw(engine, prompts(), max_new_tokens=1)).values()} == {1}
    empty = SampleBatch((), {"prompt_ids": Packed(torch.empty(0, dtype=torch.int64), ())})
    samples = draw(engine, empty, max_new_tokens=4)
    assert samples.ids == ()
    keys = {key: packed.values.dtype for key, packed in samples.data.items()}
    assert keys == {
        "input_ids": torch.int64,
        "response_mask": torch.bool,
        "old_logprobs": torch.float32,
        "truncated": torch.bool,
    }


def test_an_empty_prompt_is_refused_by_its_sample():
    batch = prompts((3, 0, 2))
    with pytest.raises(ValueError, match="11"):
        draw(build("llama", torch.float32), batch, max_new_tokens=2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("check_every", [1, 4])
@pytest.mark.parametrize("bad_call", [5, *(pytest.param(n, marks=pytest.mark.whole) for n in (0, 9))])
def test_logits_that_are_not_finite_are_refused_by_sample_and_position(
    monkeypatch, temperature: float, check_every: int, bad_call: int
):
    engine, calls = build("llama", torch.float32), []
    monkeypatch.setitem(slots.PACES, "cpu", slots.DecodingPace(check_every, 1, graphs=False))

    def poison(_: Stage, args: tuple, logits: Tensor) -> None:
        if args[2].continues:  # else there are no rows: the prompts
            calls.append(1)
            if len(calls) - 1 >= bad_call:
                logits[2] = torch.nan

    engine.stage.register_forward_hook(poison)
    place = f"logits are not finite at position {1 + bad_call} of sample 12 .token {bad_call} of its response"
    with pytest.raises(ValueError, match=f"generate: {place}"):
        draw(engine, prompts(), max_new_tokens=10, temperature=temperature)
    assert len(calls) <= bad_call + check_every


def test_finished_sequences_leave_the_batch():
    engine = build("llama", torch.float32)
    seen = watched(engine, lambda x, *_: len(x))
    samples = draw(engine, prompts((2,) * 30), max_new_tokens=30, stop_ids=STOPS)
    lengths = [len(r) for r in responses(samples).values()]
    live = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert seen == [30, *live], "a pass over prompts but for their last tokens, then a step for each token"


# Slots and passes over prompts

MANY = tuple(1 + (7 * i) % 11 for i in range(40))  # lengths of prompts


STATES = ("lfm2", "qwen3_5_text", "qwen3_next")
"""Families whose layers keep states beside keys and values."""


@pytest.mark.parametrize("family", STATES)
def test_states_say_while_decoding_what_a_full_forward_does(family: str):
    engine = build(family, torch.float64)
    samples = draw(engine, prompts(), max_new_tokens=20)
    micro = micro_batch(samples)
    with torch.no_grad():
        logits = engine.stage(micro.input_ids, micro)
    mask, expected = samples["response_mask"].values, packed_logprobs(logits, micro, WHOLE)
    torch.testing.assert_close(samples["old_logprobs"].values[mask], expected[mask], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("check_every", "micro_batches", "family"),
    [
        (4, 7, "llama"),
        (1, 2, "llama"),
        *((4, 7, family) for family in STATES),
        *(
            pytest.param(*case, "llama", marks=pytest.mark.whole)
            for case in [(4, 2), (1, 7), (4, 40), (1, 40)]
        ),
    ],
)
def test_refilled_slots_give_the_tokens_of_all_at_once(
    monkeypatch, micro_batches: int, check_every: int, family: str
):
    engine, batch = build(family, torch.float64), prompts(MANY)
    options: dict[str, Any] = {"max_new_tokens": 24, "min_new_tokens": 2, "stop_ids": STOPS, "top_p": 0.9}
    options |= {"stop_strings": StopStrings(STRINGS, TokenTexts(TEXTS)), "record_kept": True}
    whole = draw(engine, batch, **options)
    monkeypatch.setitem(slots.PACES, "cpu", slots.DecodingPace(check_every, 1, graphs=False))
    refilled = draw(engine, batch, micro_batches=micro_batches, **options)
    assert responses(refilled) == responses(whole)
    assert torch.equal(refilled["truncated"].values, whole["truncated"].values)
    assert torch.equal(refilled["kept_tokens"].values, whole["kept_tokens"].values)
    torch.testing.assert_close(refilled["old_logprobs"].values, whole["old_logprobs"].values)


@pytest.mark.parametrize(("check_every", "most_late"), [(1, 0), (5, 4)])
def test_a_sample_is_said_to_have_ended_while_others_are_drawn(monkeypatch, check_every: int, most_late: int):
    monkeypatch.setitem(slots.PACES, "cpu", slots.DecodingPace(check_every, 1, graphs=False))
    engine = build("llama", torch.float64)
    said, passes = dict[int, tuple[int, Any]](), watched(engine, tokens_of_prompts)

    def on_ended(sample: int, tokens: Any) -> None:
        assert sample not in said, "once"
        said[sample] = (passes.count(0), tokens)  # steps, without passes over prompts

    drawn = responses(draw(engine, prompts(), max_new_tokens=24, stop_ids=STOPS, on_ended=on_ended))
    assert {sample: tokens for sample, (_, tokens) in said.items()} == drawn
    late = [step - len(tokens) for step, tokens in said.values()]
    assert min(late) >= 0
    assert max(late) <= most_late, "in steps after its last token"


def test_a_sample_that_rests_between_segments_has_not_ended():
    said, before = dict[int, Any](), list[bool]()

    def enough(ended: Any) -> bool:
        before.append(said.keys() == set(ended))
        return len(ended) == len(LENGTHS)

    options: dict[str, Any] = {"max_new_tokens": 24, "stop_ids": STOPS, "segments": Segments(4, enough)}
    samples = draw(build("llama", torch.float64), prompts(), on_ended=said.__setitem__, **options)
    assert said == responses(samples)
    assert len(before) > 2, "of several segments"
    assert all(before)


def rows_and_blocks(x: Tensor, micro: MicroBatch, cache: KVCache, *prompts: Tensor) -> tuple[int, int]:
    """Rows of a step (0 of a pass over prompts), and the blocks of the cache's memory."""
    (blocks,) = {tensor.shape[0] for pair in cache._layers.values() for tensor in pair} or {0}
    return 0 if prompts else cache.rows, blocks


def test_a_finished_sequence_makes_room_for_waiting_ones():
    engine = build("llama", torch.float32)
    seen = watched(engine, rows_and_blocks)
    samples = draw(engine, prompts((2,) * 60), max_new_tokens=70, stop_ids=STOPS, micro_batches=6)
    lengths = [len(r) for r in responses(samples).values()]
    rows = [rows for rows, _ in seen if rows]
    of_longest = blocks_of(2 + 70 - 1)
    assert max(blocks for _, blocks in seen) == 10 * of_longest + 1
    assert sum(rows) == sum(lengths), "each step of a row is a token of a response"
    assert rows[0] == 10, "all may get as long as is allowed"
    assert max(rows) == ROWS_OF_SLOT * 10, "they do not: so there is room for more"
    assert len(rows) < sum(lengths) / 10 + max(lengths)


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 4}),
    *((family, {}) for family in STATES),
]
"""Families by what they keep of a sequence."""


@pytest.mark.parametrize(
    "prefill_tokens", [4, *(pytest.param(n, marks=pytest.mark.whole) for n in (1, 9, 25))]
)
@pytest.mark.parametrize(("family", "sizes"), WAYS)
def test_prompts_in_passes_of_few_tokens_give_the_tokens_of_one_pass(
    prefill_tokens: int, family: str, sizes: dict
):
    engine = build(family, torch.float64, **sizes)
    options = {"max_new_tokens": 8, "micro_batches": 2}
    whole = responses(draw(engine, prompts(MANY), **options))
    passed = watched(engine, tokens_of_prompts)
    assert responses(draw(engine, prompts(MANY), prefill_tokens=prefill_tokens, **options)) == whole
    assert max(passed) <= prefill_tokens
    assert sum(passed) == sum(MANY) - len(MANY)


def repeated(group: int, lengths=LENGTHS) -> SampleBatch:
    """Each of the prompts `group` times, as the samples of a group."""
    once = prompts(lengths)
    again = once.take([place for place in range(len(once)) for _ in range(group)])
    return SampleBatch(tuple(range(10, 10 + len(again))), again.data)


@pytest.mark.parametrize(
    "limits", [{}, {"micro_batches": 5}, {"prefill_tokens": 3}, {"groups_in_flight": 3}], ids=str
)
@pytest.mark.parametrize(("family", "sizes"), WAYS)
def test_a_shared_prompt_gives_the_tokens_of_a_repeated_one(limits: dict[str, int], family: str, sizes: dict):
    engine, batch = build(family, torch.float64, **sizes), repeated(4)
    options = {"max_new_tokens": 16, "stop_ids": STOPS}
    shared = draw(engine, batch, **options, **limits)
    assert shared.ids == batch.ids
    assert len(set(map(tuple, responses(shared).values()))) > len(LENGTHS), "samples of a prompt differ"
    for sample_id, logprobs in zip(shared.ids, shared["old_logprobs"].split(), strict=True):
        alone = draw(engine, batch.reorder([sample_id]), **options)
        assert responses(alone) == {sample_id: responses(shared)[sample_id]}
        torch.testing.assert_close(logprobs, alone["old_logprobs"].values)


@pytest.mark.parametrize("check_every", [1, 4])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5_text", marks=pytest.mark.whole)])
def test_where_blocks_run_out_the_last_sequences_are_drawn_later_with_the_same_tokens(
    monkeypatch, check_every: int, family: str
):
    """Responses are taken to end at once, so more sequences enter than have room in the end."""
    engine, batch = build(family, torch.float64), repeated(9, (2, 20, 3, 35, 2, 20, 3, 17, 2, 20))
    options: dict[str, Any] = {"max_new_tokens": 60, "stop_ids": STOPS[:2], "record_kept": True, "top_k": 20}
    options |= {"stop_strings": StopStrings(("abc",), TokenTexts(TEXTS))}
    whole = draw(engine, batch, **options)
    monkeypatch.setitem(slots.PACES, "cpu", slots.DecodingPace(check_every, 1, graphs=False))
    monkeypatch.setattr(slots, "rows_of", lambda sequences, *_: sequences)
    left, come_back, fitting = [], slots.Queue.come_back, slots.Group._fitting

    def hopeful(group: slots.Group, running: int) -> int:
        ended, group._ended = group._ended, 10**9
        count = fitting(group, running)
        group._ended = ended
        return count

    monkeypatch.setattr(slots.Group, "_fitting", hopeful)
    monkeypatch.setattr(
        slots.Queue, "come_back", lambda queue, *state: left.append(state[0]) or come_back(queue, *state)
    )
    short = draw(engine, batch, micro_batches=20, **options)
    assert len(left) > 10
    assert len(set(left)) < len(left), "some twice"
    assert responses(short) == responses(whole)
    for key in ("truncated", "kept_tokens"):
        assert torch.equal(short[key].values, whole[key].values)
    torch.testing.assert_close(short["old_logprobs"].values, whole["old_logprobs"].values)


def test_a_pass_over_prompts_has_a_multiple_of_rows_on_the_cpu_which_changes_no_token(monkeypatch):
    engine, seen = build("qwen2", torch.float64), []
    engine.stage.model.layers["0"].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    padded = draw(engine, prompts(), max_new_tokens=3)
    steps = [len(LENGTHS)] * 3
    assert seen == [ROWS, *steps]
    monkeypatch.setattr("prefect_rlhf.rlhf_tasks.parallel.model.stage.ROWS", 1)
    seen.clear()
    plain = draw(engine, prompts(), max_new_tokens=3)
    assert seen == [sum(LENGTHS) - len(LENGTHS), *steps]
    assert responses(padded) == responses(plain)
    torch.testing.assert_close(padded["old_logprobs"].values, plain["old_logprobs"].values)


@pytest.mark.parametrize(("micro_batches", "times"), [(1, 1), (4, 2), (14, 2)])
def test_a_prompt_is_read_once_while_a_sample_of_it_is_in_a_slot(micro_batches: int, times: int):
    engine = build("llama", torch.float32)
    passed = watched(engine, tokens_of_prompts)
    # 28 samples that all end after 4 tokens: at once, or in slots for 7 or 2. Then some of a prompt enter when
    # the others have left.
    draw(engine, repeated(4), max_new_tokens=4, micro_batches=micro_batches)
    once = sum(LENGTHS) - len(LENGTHS)
    assert once <= sum(passed) <= times * once


# Several ranks

Model = tuple[str, dict[str, Any]]
"""Family and what its config has beside the tiny sizes."""
LLAMA: Model = ("llama", {})
OTHERS: list[Model] = [
    ("mistral", {"sliding_window": 4}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("gemma", {"num_key_value_heads": 1}),  # embeddings are tied
    ("gemma4_text", {}),  # the second stage attends to keys of the first
    ("mixtral", {}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("gpt2", {}),
    ("lfm2", {}),
    ("lfm2_moe", {}),
    ("qwen3_5_text", {}),
    ("qwen3_5_moe_text", {}),
    ("qwen3_next", {}),
]
BY_STAGES = ("qwen2", "qwen3_moe", "lfm2_moe", "gemma4_text")
"""Families that are split by layers (both ends of the first have the embeddings); others by heads."""
BY_DEFAULT = ("qwen2", "gemma4_text", "mixtral", "gpt2", "lfm2", "qwen3_5_text")
"""Families that the default suite splits; continuous integration splits all. `make test-slow` has both ways."""


def _generate_on(
    rank: int, world: int, strategy: ParallelStrategy, model: Model, batch: SampleBatch, dtype, options: dict
) -> SampleBatch | None:
    placement = Placement(tuple(range(world)), strategy)
    groups = ProcessGroups(device_sets(placement), 240.0, CPU)
    engine = build(model[0], dtype, strategy, groups, options.pop("tokens", None), **model[1])
    mine = [i for n, i in enumerate(batch.ids) if n // 2 % strategy.dp == placement.coordinate(rank).dp]
    said = dict[int, Any]()
    samples = draw(engine, batch.reorder(mine), on_ended=said.__setitem__, **options)
    groups.close()
    assert said == ({} if samples is None else responses(samples)), "the head says which have ended"
    return samples


def assert_alike(of_ranks: list[SampleBatch | None], alone: SampleBatch, dp: int) -> None:
    """The heads have the samples that one rank draws, with log-probabilities that are equal to rounding."""
    heads = [samples for samples in of_ranks if samples is not None]
    assert len(heads) == dp
    assert sorted(sample for samples in heads for sample in samples.ids) == sorted(alone.ids)
    for samples in heads:
        expected = alone.reorder(samples.ids)
        assert samples.data.keys() == expected.data.keys()
        for key, packed in expected.data.items():
            bound = 1e-5 if key == "old_logprobs" else 0
            assert samples[key].lengths == packed.lengths
            torch.testing.assert_close(samples[key].values, packed.values, atol=bound, rtol=bound)


FEW_SLOTS = {"micro_batches": 2, "prefill_tokens": 4}
MODES: dict[str, tuple[dict[str, Any], list[tuple[int, int, int]]]] = {
    "greedy": ({"temperature": 0.0, "dtype": torch.float32}, [(1, 2, 2), (1, 2, 1)]),
    "sampled": ({}, [(s.dp, s.tp, s.pp) for s in STRATEGIES]),
    "nucleus": ({"top_p": 0.7, "record_kept": True}, [(2, 1, 2), (1, 2, 2), (1, 4, 1)]),
    "strings": (
        {
            "min_new_tokens": 2,
            "stop_ids": STOPS[:2],
            "stop_strings": StopStrings(STRINGS, TokenTexts(TEXTS)),
            "record_kept": True,
        },
        [(1, 1, 2), (2, 2, 1)],
    ),
    "padded": ({"tokens": 20}, [(2, 2, 1), (1, 2, 2), (1, 4, 1)]),
    "slots": (FEW_SLOTS, [(1, 1, 4), (1, 2, 2), (2, 2, 1)]),
    "shared": (FEW_SLOTS, [(1, 1, 4), (1, 2, 2), (2, 1, 2)]),
}
"""Mode -> its options, and what continuous integration runs of it, and the default suite the last of: plain sampling
everywhere, others where tokens are chosen from parts of the vocabulary (tp), by another stage than the one that reads
them (pp), or for a share of the samples (dp)."""


def marks(degrees: tuple[int, int, int], kept: list[tuple[int, int, int]]) -> Any:
    return () if degrees == kept[-1] else pytest.mark.whole if degrees in kept else pytest.mark.slow


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mode", "strategy"),
    [
        pytest.param(mode, strategy, marks=marks((strategy.dp, strategy.tp, strategy.pp), kept))
        for mode, (_, kept) in MODES.items()
        for strategy in STRATEGIES
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_layout(ranks, strategy: ParallelStrategy, mode: str):
    options: dict[str, Any] = {"max_new_tokens": 12, "stop_ids": STOPS, **MODES[mode][0]}
    dtype = options.pop("dtype", torch.float64)
    batch = repeated(2) if mode == "shared" else prompts()
    whole = {name: value for name, value in options.items() if name not in FEW_SLOTS}
    tokens = whole.pop("tokens", None)
    alone = draw(build("llama", dtype, tokens=tokens), batch, **whole)
    assert tokens is None or max(max(response) for response in responses(alone).values()) < tokens
    of_ranks = ranks.run(strategy.size, _generate_on, strategy, LLAMA, batch, dtype, options)
    assert_alike(of_ranks, alone, strategy.dp)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        pytest.param(
            model,
            strategy,
            id=f"{model[0]}-{strategy}",
            marks=pytest.mark.slow
            if (strategy.pp == 2) ^ (model[0] in BY_STAGES)
            else ()
            if model[0] in BY_DEFAULT
            else pytest.mark.whole,
        )
        for model in OTHERS
        for strategy in (ParallelStrategy(tp=2), ParallelStrategy(pp=2))
    ],
)
def test_greedy_tokens_of_other_families_do_not_depend_on_the_layout(
    ranks, model: Model, strategy: ParallelStrategy
):
    options = {"max_new_tokens": 12, "stop_ids": STOPS, "temperature": 0.0}
    alone = draw(build(model[0], torch.float32, **model[1]), prompts(), **options)
    of_ranks = ranks.run(2, _generate_on, strategy, model, prompts(), torch.float32, options)
    assert_alike(of_ranks, alone, dp=1)


def _empty_share(rank: int, world: int) -> Any:
    strategy = ParallelStrategy(1, 1, 2)
    groups = ProcessGroups(device_sets(Placement((0, 1), strategy)), 240.0, CPU)
    member = build("llama", torch.float32, strategy, groups)
    empty = SampleBatch((), {"prompt_ids": Packed(torch.empty(0, dtype=torch.int64), ())})
    samples = draw(member, empty, max_new_tokens=3)
    groups.close()
    return None if samples is None else samples.ids


@pytest.mark.dist
def test_an_empty_share_of_a_pipeline(ranks):
    assert ranks.run(2, _empty_share) == [None, ()]
