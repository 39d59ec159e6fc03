"""Reads a data set's rows as examples of an algorithm, and checks all of them. Torch-free."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple, TypeVar

from rlhf_tasks.algorithms.registry import algorithm
from rlhf_tasks.config.base import RunConfig, Samples
from rlhf_tasks.data.chat_template import Conversation
from rlhf_tasks.data.dataset import DataError, Rows, load_rows
from rlhf_tasks.data.rows import Reader, Reading
from rlhf_tasks.data.tokenizer import Tokenizer, TokenizerError
from rlhf_tasks.parallel.layout.shape import ModelShape

T = TypeVar("T")
ROWS_AT_ONCE = 256


def load_and_check(config: RunConfig) -> tuple[Rows, Tokenizer]:
    """The data set and the tokenizer of a run. Checks the columns and the length of every row.

    Raises DataError (naming file:line), TokenizerError, or ConfigError if the algorithm's `fetch` leaves out a key.
    """
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    rows = load_rows(config.data)
    context = _shortest_context(config)
    record = algorithm(config.type)
    for index, example in enumerate(read_examples(record.read_row, rows, range(len(rows)), tokenizer)):
        if index == 0:
            record.values(example)
        tokens = max(len(part) for part in example if isinstance(part, list))
        _check_length(config, tokens, context, rows.where(index))
    return rows, tokenizer


def mean_prompt_tokens(config: RunConfig, most: int = 1000) -> float:
    """Mean tokens of a prompt (SFT: of a row; reward model: of both answers), over at most `most` evenly spaced rows.

    Raises DataError, TokenizerError, or ValueError where there is no tokenizer.
    """
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    rows = load_rows(config.data)
    looked_at = range(0, len(rows), -(-len(rows) // most))
    examples = read_examples(algorithm(config.type).read_row, rows, looked_at, tokenizer)
    return sum(len(ids) for e in examples for ids in e if isinstance(ids, list)) / len(looked_at)


def read_examples(reader: Reader[T], rows: Rows, indexes: Sequence[int], tokenizer: Tokenizer) -> Iterator[T]:
    """The rows at `indexes` as examples. Raises DataError that names the row's place."""
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
    """Adds the row's place to a DataError or TokenizerError raised inside."""
    try:
        yield
    except (DataError, TokenizerError) as error:
        place = rows.where(index)
        raise DataError(str(error) if str(error).startswith(place) else f"{place}: {error}") from None


class Context(NamedTuple):
    """A role, its model folder, and the length in tokens of the longest sequence that the model takes."""

    role: str
    folder: str
    tokens: int


def _check_length(config: RunConfig, tokens: int, context: Context, place: str) -> None:
    """Raises DataError for a row of more tokens than the user allows or than fit into a model's context."""
    if tokens > config.data.max_prompt_tokens:
        raise DataError(
            f"{place}: has {tokens} tokens, but data.max_prompt_tokens is {config.data.max_prompt_tokens}. "
            "Shorten or remove the row, or raise the limit."
        )
    answer = config.sampling.max_completion_length if isinstance(config, Samples) else 0
    if tokens + answer > context.tokens:
        both = f"{tokens} tokens and an answer up to {answer} more" if answer else f"{tokens} tokens"
        raise DataError(
            f"{place}: has {both}, but the context of role {context.role!r} ({context.folder}) holds "
            f"{context.tokens}. Shorten the row{' or the answer' if answer else ''}."
        )


def _shortest_context(config: RunConfig) -> Context:
    """The shortest context of all roles' models: every role reads whole sequences."""
    found = (
        Context(role, parts.folder, ModelShape.from_folder(parts.folder).context)
        for role, parts in config.roles().items()
    )
    return min(found, key=lambda context: context.tokens)
