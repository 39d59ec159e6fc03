"""From rows to token ids: what each algorithm reads of a row, and the check of a whole data set. Torch-free.

Rows have the columns of TRL's data set types, standard (text) or conversational (messages), or those of
verl's Parquet files. Everything an algorithm does not read itself is a further column, handed to the rewards.
"""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from rlhf_tasks.algorithms.configurations import AnyConfig, GRPOConfig, PPOConfig, RolloutConfig
from rlhf_tasks.data.chat_template import Conversation
from rlhf_tasks.data.dataset import DataError, Row, Rows, load_rows
from rlhf_tasks.data.tokenizer import Tokenizer, TokenizerError
from rlhf_tasks.parallel.layout.shape import ModelShape
from rlhf_tasks.system.reading import one_line

T = TypeVar("T")
Reading = Generator[list[Conversation], list[str], T]
"""A row being read: it asks once for the texts of conversations, and returns what was read. So the conversations of
many rows are rendered together."""
Reader = Callable[[Row, Tokenizer], Reading[T]]
ROWS_AT_ONCE = 256


class PromptExample(NamedTuple):
    """A prompt to answer. columns: JSON of the row, the prompt itself included, for the rewards."""

    prompt_ids: list[int]
    columns: str


class CompletionExample(NamedTuple):
    """A sequence to learn; the first `prompt_tokens` of `input_ids` are given, the rest is learned."""

    input_ids: list[int]
    prompt_tokens: int


class PairExample(NamedTuple):
    """Two answers to one prompt, each with the prompt before it."""

    chosen_ids: list[int]
    rejected_ids: list[int]


def prompt_example(row: Row, tokenizer: Tokenizer) -> Reading[PromptExample]:
    """`prompt` (text or messages) and any further columns. Raises DataError, without its place."""
    prompt = _column(row, "prompt")
    is_text = isinstance(prompt, str)
    texts = yield [] if is_text else [(_messages(prompt, "prompt"), True)]
    ids = tokenizer.encode(prompt if is_text else texts[0], special_tokens=is_text)
    if not ids:
        raise DataError("has an empty prompt.")
    return PromptExample(ids, json.dumps(dict(row), ensure_ascii=False, default=str))


def completion_example(row: Row, tokenizer: Tokenizer) -> Reading[CompletionExample]:
    """`prompt` + `completion`, `messages` (the last one is learned), or `text` (all of it is learned).

    Raises DataError, without its place.
    """
    if "messages" in row:
        messages = _messages(row["messages"], "messages")
        prompt, (completion,) = yield from _turn_ids(messages[:-1], [messages[-1:]], tokenizer)
    elif "text" in row:
        yield []
        ids = _ended(tokenizer.encode(_text(row["text"], "text"), special_tokens=True), tokenizer)
        prompt, completion = [], ids
    else:
        answers = [_column(row, "completion")]
        prompt, (completion,) = yield from _answer_ids(_column(row, "prompt"), answers, tokenizer)
    if not prompt:  # nothing stands before the first token to predict it from
        prompt, completion = completion[:1], completion[1:]
    if not completion:
        raise DataError("has nothing to learn: the completion is empty.")
    return CompletionExample(prompt + completion, len(prompt))


def pair_example(row: Row, tokenizer: Tokenizer) -> Reading[PairExample]:
    """`prompt`, `chosen` and `rejected`; without `prompt` it is what the two answers begin with in common.

    Raises DataError, without its place.
    """
    chosen, rejected = _column(row, "chosen"), _column(row, "rejected")
    prompt = row.get("prompt")
    if prompt is None:
        common = 0
        if not isinstance(chosen, str):
            pairs = zip(_messages(chosen, "chosen"), _messages(rejected, "rejected"), strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
        elif not isinstance(rejected, str):
            raise DataError("chosen is text, but rejected is not. Give both as text or both as messages.")
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    first, answers = yield from _answer_ids(prompt, [chosen, rejected], tokenizer)
    pair = PairExample(*(first + then for then in answers))
    if not all(pair):
        raise DataError("has an empty answer.")
    return pair


def load_and_check(config: AnyConfig) -> tuple[Rows, Tokenizer]:
    """The data set and the tokenizer of a run, every row checked: its columns and its length.

    Raises DataError (naming file:line) or TokenizerError.
    """
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    rows = load_rows(config.data)
    context = _shortest_context(config)
    for index, example in enumerate(read_examples(READERS[config.type], rows, range(len(rows)), tokenizer)):
        tokens = max(len(part) for part in example if isinstance(part, list))
        _check_length(config, tokens, context, rows.where(index))
    return rows, tokenizer


def mean_prompt_tokens(config: AnyConfig, most: int = 1000) -> float:
    """Mean tokens of a prompt (SFT: of a row; reward model: of both answers), over at most `most` of the rows.

    Raises DataError, TokenizerError, or ValueError where there is no tokenizer to count with.
    """
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    rows = load_rows(config.data)
    looked_at = range(0, len(rows), -(-len(rows) // most))
    examples = read_examples(READERS[config.type], rows, looked_at, tokenizer)
    return sum(len(ids) for e in examples for ids in e if isinstance(ids, list)) / len(looked_at)


def read_examples(reader: Reader[T], rows: Rows, indexes: Sequence[int], tokenizer: Tokenizer) -> Iterator[T]:
    """Rows as examples. Raises DataError that names the row's place."""
    for start in range(0, len(indexes), ROWS_AT_ONCE):
        begun: list[tuple[int, Reading[T], list[Conversation]]] = []
        for index in indexes[start : start + ROWS_AT_ONCE]:
            with _at(rows, index):
                reading = reader(rows[index], tokenizer)
                begun.append((index, reading, next(reading)))
        texts = tokenizer.render([each for *_, asked in begun for each in asked])
        for index, reading, asked in begun:
            with _at(rows, index):
                example = _returned(reading, list(islice(texts, len(asked))))
            yield example


def _returned(reading: Reading[T], texts: list[str]) -> T:
    try:
        reading.send(texts)
    except StopIteration as end:
        return end.value
    raise AssertionError("a reader has asked twice")


@contextmanager
def _at(rows: Rows, index: int) -> Iterator[None]:
    """What is refused inside is refused with its place."""
    try:
        yield
    except (DataError, TokenizerError) as error:
        place = rows.where(index)
        raise DataError(str(error) if str(error).startswith(place) else f"{place}: {error}") from None


class Context(NamedTuple):
    """The longest sequence that a role's model takes, in tokens."""

    role: str
    folder: str
    tokens: int


def _check_length(config: AnyConfig, tokens: int, context: Context, place: str) -> None:
    """Refuse a row that is longer than the user allows or than a model's context holds."""
    if tokens > config.data.max_prompt_tokens:
        raise DataError(
            f"{place}: has {tokens} tokens, but data.max_prompt_tokens is {config.data.max_prompt_tokens}. "
            "Shorten or remove the row, or raise the limit."
        )
    answer = (
        config.sampling.max_completion_length
        if isinstance(config, PPOConfig | GRPOConfig | RolloutConfig)
        else 0
    )
    if tokens + answer > context.tokens:
        both = f"{tokens} tokens and an answer up to {answer} more" if answer else f"{tokens} tokens"
        raise DataError(
            f"{place}: has {both}, but the context of role {context.role!r} ({context.folder}) holds "
            f"{context.tokens}. Shorten the row{' or the answer' if answer else ''}."
        )


def _shortest_context(config: AnyConfig) -> Context:
    """Of the roles' models; every role reads whole sequences."""
    found = (
        Context(role, parts.folder, ModelShape.from_folder(parts.folder).context)
        for role, parts in config.roles().items()
    )
    return min(found, key=lambda context: context.tokens)


def _column(row: Row, name: str) -> Any:
    value = row.get(name)
    if value is None:
        raise DataError(
            f"has no column {name!r} (columns: {one_line(', '.join(row))}). Rename one with data.column_map."
        )
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"column {name!r} must be text, found {type(value).__name__}.")
    return value


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    """A conversation: a non-empty list of {role, content}."""
    well_formed = isinstance(value, list) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value
    )
    if not well_formed or not value:
        raise DataError(f"column {name!r} must be text or a list of messages with `role` and `content`.")
    return value


Answers = tuple[list[int], list[list[int]]]
"""Token ids of a prompt, and of each answer to it with its end token."""


def _answer_ids(prompt: Any, answers: list[Any], tokenizer: Tokenizer) -> Reading[Answers]:
    if not isinstance(prompt, str):
        before = _messages(prompt, "prompt") if prompt else []
        turns = [
            [{"role": "assistant", "content": a}] if isinstance(a, str) else _messages(a, "answer")
            for a in answers
        ]
        return (yield from _turn_ids(before, turns, tokenizer))
    if not all(isinstance(answer, str) for answer in answers):
        raise DataError("prompt is text, but its answer is not. Give both as text or both as messages.")
    yield []
    ended = [_ended(tokenizer.encode(answer), tokenizer) for answer in answers]
    return tokenizer.encode(prompt, special_tokens=True), ended


def _turn_ids(before: list, turns: list[list], tokenizer: Tokenizer) -> Reading[Answers]:
    """Token ids of a conversation and of each turn that may follow it."""
    asked: list[Conversation] = [(before, True)] if before else []
    texts = yield [*asked, *(([*before, *turn], False) for turn in turns)]
    opening, wholes = (texts[0], texts[1:]) if before else ("", texts)
    if not all(whole.startswith(opening) for whole in wholes):
        raise DataError(
            "the chat template changes earlier turns when one is added, so answers cannot be told apart."
        )
    return tokenizer.encode(opening), [tokenizer.encode(whole[len(opening) :]) for whole in wholes]


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids with an end token at their end."""
    return ids if ids and ids[-1] in tokenizer.stop_ids else [*ids, tokenizer.eos_id]


READERS: dict[str, Reader[tuple]] = {
    "ppo": prompt_example,
    "grpo": prompt_example,
    "rollout": prompt_example,
    "sft": completion_example,
    "reward_model": pair_example,
}
