"""A data set as its algorithm reads it: rows as examples, kept as token ids beside the runs. Torch-free."""

import hashlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from rlhf_tasks.algorithms.registry import Algorithm, algorithm
from rlhf_tasks.config.base import RunConfig, Samples
from rlhf_tasks.data import chat_template, rows, tokenizer
from rlhf_tasks.data.chat_template import Conversation
from rlhf_tasks.data.dataset import DataError, DataSet, PlacedRow, data_set, step_between
from rlhf_tasks.data.rows import Reader, Reading
from rlhf_tasks.data.token_file import TokenFile, TokenRow, write_token_file
from rlhf_tasks.data.tokenizer import Tokenizer, TokenizerError
from rlhf_tasks.parallel.layout.shape import ModelShape

T = TypeVar("T")
ROWS_AT_ONCE = 256
ROWS = "rows"  # folder of tokenised data sets, in the output folder
SAMPLED = 1000  # rows at most that a mean is taken over
FORMAT = 1  # of token files


def prepared_rows(config: RunConfig) -> TokenFile:
    """The tokenised data set of a run, every row checked: its columns and its length.

    It is made once, in `output_dir`/rows, for all runs with the same data, tokenizer, chat template and algorithm.
    Raises DataError (naming file:line), TokenizerError, or ConfigError for an algorithm that lacks a key of the data.
    """
    record, data = algorithm(config.type), data_set(config.data)
    path = _token_file(config, record, data)
    if not path.exists():
        files = [str(file.path) for file in data.files]
        write_token_file(path, data.digest, files, _token_rows(record, data, config.models.tokenizer))
    made = TokenFile.open(path)
    _check_lengths(config, made)
    return made


def mean_prompt_tokens(config: RunConfig) -> float:
    """Mean tokens of a prompt (SFT: of a row; reward model: of both answers), over at most SAMPLED of the rows.

    Raises DataError, TokenizerError, or ValueError where there is no tokenizer to count with.
    """
    record, data = algorithm(config.type), data_set(config.data)
    path = _token_file(config, record, data)
    if path.exists():
        made = TokenFile.open(path)
        return float(np.mean(made.tokens[:: step_between(len(made), SAMPLED)]))
    reader = Tokenizer.from_folder(config.models.tokenizer)
    examples = read_examples(record.read_row, data.some(SAMPLED), reader)
    return float(np.mean([sum(map(len, _ids(example))) for _, example in examples]))


def read_examples(
    reader: Reader[T], placed: Iterable[PlacedRow], tokenizer: Tokenizer
) -> Iterator[tuple[PlacedRow, T]]:
    """Rows and what the reader makes of them. Raises DataError that names the row's place."""
    remaining = iter(placed)
    while taken := list(islice(remaining, ROWS_AT_ONCE)):
        begun: list[tuple[PlacedRow, Reading[T], list[Conversation]]] = []
        for each in taken:
            with _at(each.where):
                reading = reader(each.row, tokenizer)
                begun.append((each, reading, next(reading)))
        texts = tokenizer.render([each for *_, asked in begun for each in asked])
        for each, reading, asked in begun:
            with _at(each.where):
                example = _returned(reading, list(islice(texts, len(asked))))
            yield each, example


def _token_file(config: RunConfig, record: Algorithm, data: DataSet) -> Path:
    """Where a data set's tokens are kept. The name is a digest of all that they depend on."""
    digest = hashlib.sha256(f"{FORMAT} {record.name} {version('tokenizers')} {data.digest}".encode())
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        digest.update(_content(Path(config.models.tokenizer, name)))
    digest.update(_content(Path(config.models.tokenizer, "chat_template.jinja")))
    digest.update(repr([sorted(data.column_map.items()), [str(file.path) for file in data.files]]).encode())
    for code in (record.read_row, record.fetch, rows, tokenizer, chat_template):
        digest.update(_content(Path(inspect.getsourcefile(code) or "")))
    return Path(config.output_dir, ROWS, f"{digest.hexdigest()[:32]}.arrow").resolve()


def _content(path: Path) -> bytes:
    """The digest of a file's content; of none, where there is no such file."""
    if not path.is_file():
        return bytes(32)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _token_rows(record: Algorithm, data: DataSet, folder: str) -> Iterator[TokenRow]:
    for placed, example in read_examples(record.read_row, data, Tokenizer.from_folder(folder)):
        lengths = [len(ids) for ids in _ids(example)]
        values = record.values(example)
        columns = tuple(name for name in placed.row)
        yield TokenRow(placed.file, placed.line, columns, max(lengths, default=0), sum(lengths), values)


def _ids(example: tuple) -> list[list[int]]:
    """An example's token ids."""
    return [part for part in example if isinstance(part, list)]


def _returned(reading: Reading[T], texts: list[str]) -> T:
    try:
        reading.send(texts)
    except StopIteration as end:
        return end.value
    raise AssertionError("a reader has asked twice")


@contextmanager
def _at(place: str) -> Iterator[None]:
    """What is refused inside is refused with its place."""
    try:
        yield
    except (DataError, TokenizerError) as error:
        raise DataError(str(error) if str(error).startswith(place) else f"{place}: {error}") from None


class Context(NamedTuple):
    """The longest sequence that a role's model takes, in tokens."""

    role: str
    folder: str
    tokens: int


def _check_lengths(config: RunConfig, made: TokenFile) -> None:
    """Refuse a row that is longer than the user allows or than a model's context holds."""
    context, allowed = _shortest_context(config), config.data.max_prompt_tokens
    answer = config.sampling.max_completion_length if isinstance(config, Samples) else 0
    too_long = np.flatnonzero(made.longest > min(allowed, context.tokens - answer))
    if not len(too_long):
        return
    place, tokens = made.where(int(too_long[0])), int(made.longest[too_long[0]])
    if tokens > allowed:
        raise DataError(
            f"{place}: has {tokens} tokens, but data.max_prompt_tokens is {allowed}. "
            "Shorten or remove the row, or raise the limit."
        )
    both = f"{tokens} tokens and an answer up to {answer} more" if answer else f"{tokens} tokens"
    raise DataError(
        f"{place}: has {both}, but the context of role {context.role!r} ({context.folder}) holds "
        f"{context.tokens}. Shorten the row{' or the answer' if answer else ''}."
    )


def _shortest_context(config: RunConfig) -> Context:
    """Of the roles' models; every role reads whole sequences."""
    found = (
        Context(role, parts.folder, ModelShape.from_folder(parts.folder).context)
        for role, parts in config.roles().items()
    )
    return min(found, key=lambda context: context.tokens)
