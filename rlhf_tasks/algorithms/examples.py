"""Reads a data set's rows as examples of an algorithm, checks them, and keeps them as token ids. Torch-free."""

import hashlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlhf_tasks.algorithms.registry import Algorithm, algorithm
from rlhf_tasks.config.base import RunConfig, Samples
from rlhf_tasks.data import chat_template, rows, tokenizer
from rlhf_tasks.data.chat_template import Conversation
from rlhf_tasks.data.dataset import DataError, DataSet, PlacedRow, data_set
from rlhf_tasks.data.rows import Reader, Reading
from rlhf_tasks.data.token_file import ROWS, SAMPLED, TokenFile, TokenRow, new_token_file
from rlhf_tasks.data.tokenizer import Tokenizer, TokenizerError
from rlhf_tasks.parallel.layout.shape import ModelShape

T = TypeVar("T")
ROWS_AT_ONCE = 256
FORMAT = 1  # of token files


def prepared_rows(config: RunConfig, folder: Path | None = None, name: str = ROWS) -> TokenFile:
    """The tokenised data set of a run, every row checked: its columns and its length.

    folder  of a run that may have its token file already; else `TokenFile.keep` gives it one
    name    of the token file in it
    Raises DataError (naming file:line), TokenizerError, or ConfigError if the algorithm's `fetch` leaves out a key.
    """
    record, data, limit = algorithm(config.type), data_set(config.data), _Limit.of(config)
    key, kept = _key(config, record, data), None
    if folder is not None:
        with suppress(DataError):  # none, or a damaged one: it is made anew
            kept = TokenFile.open(folder / name)
    if kept is None or kept.key != key:
        files = [str(file.path) for file in data.files]
        rows = _token_rows(config, record, data, limit)
        return new_token_file(Path(config.output_dir), key, data.digest, files, rows)
    longer = kept.first_longer(limit.most)
    if longer is not None:
        limit.check(longer[1], kept.where(longer[0]))
    return kept


def mean_prompt_tokens(config: RunConfig) -> float:
    """Mean tokens of an example (a prompt, a sequence, or both answers of a pair), over at most SAMPLED of the rows.

    Equals `TokenFile.mean_tokens` where every row is one example. Raises DataError, TokenizerError, or ValueError
    where there is no tokenizer.
    """
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    sampled = data_set(config.data).some(SAMPLED)
    examples = read_examples(algorithm(config.type).reader(config), sampled, tokenizer)
    tokens = [sum(len(ids) for ids in _ids(example)) for _, example in examples]
    return sum(tokens) / len(tokens)


def read_examples(
    reader: Reader[Any], placed: Iterable[PlacedRow], tokenizer: Tokenizer
) -> Iterator[tuple[PlacedRow, Any]]:
    """The examples that the reader makes of rows, each with its row. Raises DataError that names the row's place."""
    remaining = iter(placed)
    while taken := list(islice(remaining, ROWS_AT_ONCE)):
        begun: list[tuple[PlacedRow, Reading[Any], list[Conversation]]] = []
        for each in taken:
            with _at(each.where):
                reading = reader(each.row, tokenizer)
                begun.append((each, reading, next(reading)))
        texts = tokenizer.render([each for *_, asked in begun for each in asked])
        for each, reading, asked in begun:
            with _at(each.where):
                read = _returned(reading, list(islice(texts, len(asked))))
            yield from ((each, example) for example in (read if isinstance(read, list) else [read]))


def _key(config: RunConfig, record: Algorithm, data: DataSet) -> str:
    """A digest of all that the tokens of a data set depend on."""
    digest = hashlib.sha256(f"{FORMAT} {record.name} {version('tokenizers')} {data.digest}".encode())
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        digest.update(_content(Path(config.models.tokenizer, name)))
    digest.update(_content(Path(config.models.tokenizer, "chat_template.jinja")))
    digest.update(repr([sorted(data.column_map.items()), [str(file.path) for file in data.files]]).encode())
    digest.update(repr(record.options(config)).encode())
    for code in (record.read_row, record.fetch, rows, tokenizer, chat_template):
        digest.update(_content(Path(inspect.getsourcefile(code) or "")))
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    """The digest of a file's content; of none, where there is no such file."""
    if not path.is_file():
        return bytes(32)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _token_rows(config: RunConfig, record: Algorithm, data: DataSet, limit: "_Limit") -> Iterator[TokenRow]:
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    for placed, example in read_examples(record.reader(config), data, tokenizer):
        lengths = tuple(len(ids) for ids in _ids(example))
        limit.check(max(lengths, default=0), placed.where)
        values = record.values(example)
        yield TokenRow(placed.file, placed.line, tuple(placed.row), lengths, values)


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
    """Adds the row's place to a DataError or TokenizerError raised inside."""
    try:
        yield
    except (DataError, TokenizerError) as error:
        raise DataError(str(error) if str(error).startswith(place) else f"{place}: {error}") from None


class _Limit(NamedTuple):
    """How long a row may be, in tokens.

    allowed  by data.max_prompt_tokens
    context  of the role whose model has the shortest one, its model in `folder`; every role reads whole sequences
    answer   the most tokens that are generated behind a row
    """

    allowed: int
    role: str
    folder: str
    context: int
    answer: int

    @staticmethod
    def of(config: RunConfig) -> "_Limit":
        found = [
            (ModelShape.from_folder(parts.folder).context, role, parts.folder)
            for role, parts in config.roles().items()
        ]
        context, role, folder = min(found, key=lambda each: each[0])
        answer = config.sampling.max_completion_length if isinstance(config, Samples) else 0
        return _Limit(config.data.max_prompt_tokens, role, folder, context, answer)

    @property
    def most(self) -> int:
        return min(self.allowed, self.context - self.answer)

    def check(self, tokens: int, place: str) -> None:
        """Raises DataError for a row of more tokens than the user allows or than fit into a model's context."""
        if tokens > self.allowed:
            raise DataError(
                f"{place}: has {tokens} tokens, but data.max_prompt_tokens is {self.allowed}. "
                "Shorten or remove the row, or raise the limit."
            )
        if tokens > self.most:
            answer = f" and an answer up to {self.answer} more" if self.answer else ""
            raise DataError(
                f"{place}: has {tokens} tokens{answer}, but the context of role {self.role!r} ({self.folder}) "
                f"holds {self.context}. Shorten the row{' or the answer' if answer else ''}."
            )
