"""Reads a data set's rows as examples of an algorithm, checks them, and keeps them as token ids. Torch-free."""

import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import chain, islice, repeat, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm, algorithm
from prefect_rlhf.rlhf_tasks.config.base import RunConfig
from prefect_rlhf.rlhf_tasks.config.sampling import Samples, Scores
from prefect_rlhf.rlhf_tasks.data import chat_template, dataset, rows, tokenizer
from prefect_rlhf.rlhf_tasks.data.chat_template import Conversation
from prefect_rlhf.rlhf_tasks.data.dataset import (
    BadRow,
    DataError,
    DataSet,
    PlacedRow,
    data_set,
    refuse,
    row_hash,
)
from prefect_rlhf.rlhf_tasks.data.rows import Reader, Reading, messages, tools_of
from prefect_rlhf.rlhf_tasks.data.token_file import ROWS, SAMPLED, TokenFile, TokenRow, new_token_file
from prefect_rlhf.rlhf_tasks.data.tokenizer import Observations, Tokenizer, TokenizerError
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import own_or_base, read_shape
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, shown
from prefect_rlhf.rlhf_tasks.user_code.tools.schemas import schemas_of, tool_format

T = TypeVar("T")
ROWS_AT_ONCE = 256
FORMAT = 5  # of token files
MOST_MALFORMED, MOST_MALFORMED_SHARE = 10, 0.01
"""At most so many malformed rows, or this share of all rows, are skipped; rows that are too long do not count."""
PROBE = "an-answer"
CONVERSATIONS = ("prompt", "messages", "conversations", "completion", "chosen")  # columns
LABEL = "desirable"  # the stored key of `LabelledExample`


def prepared_rows(config: RunConfig, folder: Path | None = None, name: str = ROWS) -> TokenFile:
    """The tokenised data set of a run, every row checked: its columns and its length.

    folder  of a run that may have its token file already; else `TokenFile.keep` gives it one
    name    of the token file in it
    Raises DataError (naming file:line), TokenizerError, or ConfigError if the algorithm's `fetch` leaves out a key or
    tools do not fit.
    """
    record, data, limit = algorithm(config.type), data_set(config.data), _Limit.of(config)
    tools = _tools(config)
    if tools:
        _refuse_unfit_tools(config, tools, limit)
    key, stored = _key(config, record, data, limit, tools), None
    if folder is not None:
        with suppress(DataError):  # none, or a damaged one: it is made anew
            stored = TokenFile.open(folder / name)
    if stored is None or stored.key != key:
        files = [str(file.path) for file in data.files]
        skipped = _Skipped()
        bad = (skipped.malformed_row, skipped.long_row) if _skips(config) else (refuse, refuse)
        tokenizer = Tokenizer.from_folder(config.models.tokenizer)
        rows = _token_rows(config, tokenizer, record, data, limit, *bad, tools)
        place, given = Path(config.output_dir), (skipped.rows, data.sources, tokenizer.size)
        made = new_token_file(place, key, data.digest, files, rows, *given)
        skipped.refuse_many(len(made))
        _refuse_empty(made, config)
        _refuse_one_label(made, config)
        return made
    longer = stored.first_longer(limit.most)
    if longer is not None:
        limit.check(longer[1], stored.where(longer[0]))
    return stored


def prompt_tokens(config: RunConfig) -> list[int]:
    """Tokens of each example (a prompt, a sequence, or both answers of a pair), of at most SAMPLED of the rows.

    Equals `TokenFile.tokens` where every row is one example. Raises DataError, TokenizerError, or ValueError
    where there is no tokenizer.
    """
    return [sum(len(ids) for ids in _ids(example)) for example in _sampled(config)]


def learns_from_pairs(config: RunConfig) -> bool:
    """Whether a sample of the algorithm is a pair of answers."""
    return "chosen_ids" in algorithm(config.type).dataset_keys


def shared_tokens(config: RunConfig) -> float:
    """Mean number of first tokens that both answers of a pair share (their prompt), over at most SAMPLED of the
    rows. Raises as `prompt_tokens` does."""
    shared = [
        sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*_ids(pair), strict=False)))
        for pair in _sampled(config)
    ]
    return sum(shared) / max(1, len(shared))


def _sampled(config: RunConfig) -> list[Any]:
    """The examples of at most SAMPLED of the rows."""
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    bad = _ignored if _skips(config) else refuse
    sampled = data_set(config.data).some(SAMPLED, bad)
    examples = read_examples(algorithm(config.type).reader(config), sampled, tokenizer, bad, _tools(config))
    return [example for _, example in examples]


def first_example(config: RunConfig, reader: Reader[Any], tokenizer: Tokenizer) -> tuple[PlacedRow, Any]:
    """The first row that can be used, and its example. Raises DataError where there is none."""
    bad = _ignored if _skips(config) else refuse
    first = next(read_examples(reader, data_set(config.data).rows(bad), tokenizer, bad, _tools(config)), None)
    if first is None:
        raise DataError(f"{config.data.name}: has no row that can be used.")
    return first


def _ignored(where: str, error: DataError) -> None:
    """A `BadRow` that leaves the row out."""


def read_examples(
    reader: Reader[Any],
    placed: Iterable[PlacedRow],
    tokenizer: Tokenizer,
    bad: BadRow = refuse,
    of_run: Sequence[Any] = (),
) -> Iterator[tuple[PlacedRow, Any]]:
    """The examples that the reader makes of rows, each with its row. `bad` is called for rows that give none.

    of_run  JSON schemas of the run's tools, which a chat template offers in place of the row's own
    """
    remaining = iter(placed)
    while taken := list(islice(remaining, ROWS_AT_ONCE)):
        begun: list[tuple[PlacedRow, Reading[Any], list[Conversation]]] = []
        for each in taken:
            try:
                with _at(each.where):
                    reading = reader(each.row, tokenizer)
                    tools = of_run or tools_of(each.row)
                    conversations: list[Conversation] = [(one[0], one[1], tools) for one in next(reading)]
                    if of_run and not conversations:
                        raise DataError(
                            "the prompt is text, but a chat template offers the run's tools. Give it as messages, or "
                            "leave out tools."
                        )
            except DataError as error:
                bad(each.where, error)
                continue
            begun.append((each, reading, conversations))
        yield from _finished(begun, tokenizer, bad)


def _finished(
    begun: list[tuple[PlacedRow, Reading[Any], list[Conversation]]], tokenizer: Tokenizer, bad: BadRow
) -> Iterator[tuple[PlacedRow, Any]]:
    """The examples of rows whose conversations must be rendered first."""
    texts: Iterator[str] | None = None
    for place, (each, reading, conversations) in enumerate(begun):
        if texts is None:
            texts = tokenizer.render([one for *_, rest in begun[place:] for one in rest])
        try:
            with _at(each.where):
                read = _returned(reading, list(islice(texts, len(conversations))))
        except DataError as error:
            bad(each.where, error)
            texts = None  # no text follows one that failed
            continue
        yield from ((each, example) for example in (read if isinstance(read, list) else [read]))


def _skips(config: RunConfig) -> bool:
    return config.data.on_bad_row == "skip"


def _tools(config: RunConfig) -> list[dict[str, Any]]:
    """The JSON schemas of a run's tools."""
    return schemas_of(config) if isinstance(config, Scores) else []


def _refuse_unfit_tools(config: RunConfig, tools: Sequence[Any], limit: "_Limit") -> None:
    """Raises ConfigError where the model cannot be offered the tools, or cannot read what they answer."""
    assert isinstance(config, Scores), "others have no tools"
    tool_format(config)
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    size = len(tokenizer.encode(json.dumps(tools, ensure_ascii=False)))
    if size >= limit.most:
        raise ConfigError(
            f"tools: their schemas have {size} tokens, but a prompt at most {limit.most}, by data.max_prompt_tokens "
            "and the model's context. Shorten their docstrings, name fewer tools, or raise the limit."
        )
    answer = {"name": tools[0]["function"]["name"], "id": "call00000", "content": PROBE}
    if PROBE not in tokenizer.decode(Observations(tokenizer).ids([answer], [], last=-1)):
        raise ConfigError(
            f"tools: the chat template of {config.models.tokenizer} does not write what a tool answers. Correct it, "
            "or choose a model that was trained with tools."
        )


def _key(config: RunConfig, record: Algorithm, data: DataSet, limit: "_Limit", tools: Sequence[Any]) -> str:
    """A digest of everything that the tokens of a data set depend on."""
    digest = hashlib.sha256(f"{FORMAT} {record.name} {version('tokenizers')} {data.digest}".encode())
    names = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
    for name in (*names, "chat_template.jinja"):
        digest.update(_content(own_or_base(config.models.tokenizer, name)))
    files = [str(file.path) for file in data.files]
    digest.update(repr([sorted(data.column_map.items()), data.as_messages, files]).encode())
    if config.data.max_rows is not None or _skips(config):
        digest.update(repr([config.data.max_rows, _skips(config) and limit.most]).encode())
    if len(config.data.sources) > 1:
        digest.update(repr(data.sources).encode())
    digest.update(repr(record.options(config)).encode())
    if tools:
        digest.update(json.dumps(tools).encode())
    for code in (record.read_row, record.fetch, rows, dataset, tokenizer, chat_template):
        digest.update(_content(Path(inspect.getsourcefile(code) or "")))
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    """The digest of a file's content; 32 zero bytes if there is no such file."""
    if not path.is_file():
        return bytes(32)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _token_rows(
    config: RunConfig,
    tokenizer: Tokenizer,
    record: Algorithm,
    data: DataSet,
    limit: "_Limit",
    bad: BadRow,
    long: BadRow,
    tools: Sequence[Any],
) -> Iterator[TokenRow]:
    if isinstance(config, Samples):
        _refuse_silent_template(data, tokenizer)
    most, taken, last = config.data.max_rows, Counter[int](), ""
    for placed, example in read_examples(record.reader(config), data.rows(bad), tokenizer, bad, tools):
        source = data.sources[placed.file]
        if taken[source] == most and placed.where != last:  # a row may give several examples
            if source == data.sources[-1]:
                break
            continue
        lengths = tuple(len(ids) for ids in _ids(example))
        try:
            limit.check(max(lengths, default=0), placed.where)
        except DataError as error:
            long(placed.where, error)
            continue
        taken[source] += placed.where != last
        last = placed.where
        values = record.values(example)
        yield TokenRow(placed.file, placed.line, tuple(placed.row), lengths, values, row_hash(placed.raw))


def _refuse_empty(rows: TokenFile, config: RunConfig) -> None:
    """Raises DataError for a source without a row."""
    for source, count in zip(config.data.sources, chain(rows.sources, repeat(0)), strict=False):
        if not count:
            raise DataError(f"{source.path}: has no row that can be used. Correct or remove that source.")


def _refuse_one_label(rows: TokenFile, config: RunConfig) -> None:
    """Raises DataError where an algorithm learns from labels, and all rows have the same one."""
    if LABEL not in rows.keys:
        return
    labels = rows.distinct(LABEL, 2)
    if len(labels) == 1:
        raise DataError(
            f"{config.data.name}: all {len(rows)} rows have the label {str(bool(labels[0])).lower()}, but "
            f"{config.type} learns from both. Add rows of the other kind{', or train by sft' if labels[0] else ''}."
        )


class _Skipped:
    """The rows that a run with `on_bad_row: skip` leaves out: (place, reason), and how many of them are malformed."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []
        self.malformed = 0

    def malformed_row(self, where: str, error: DataError) -> None:
        """A `BadRow` for rows that are no examples."""
        self.malformed += 1
        self.long_row(where, error)

    def long_row(self, where: str, error: DataError) -> None:
        """A `BadRow` for rows that are too long."""
        self.rows.append((where, str(error).removeprefix(f"{where}: ")))

    def refuse_many(self, n_used: int) -> None:
        """Raises DataError where more rows are malformed than a sound data set has."""
        seen = n_used + len(self.rows)
        if self.malformed > max(MOST_MALFORMED, MOST_MALFORMED_SHARE * seen):
            where, why = self.rows[0]
            raise DataError(
                f"{where}: {why} {self.malformed} of the {seen} rows are malformed: more than "
                f"{MOST_MALFORMED_SHARE:.0%} are not skipped. Correct the data."
            )


def _refuse_silent_template(data: DataSet, tokenizer: Tokenizer) -> None:
    """Raises DataError where the chat template does not open the assistant's turn after a prompt, though it writes
    something there before an answer: the model would have to write that itself."""
    placed = next(data.rows(_ignored), None)
    prompt = None if placed is None else placed.row.get("prompt")
    if placed is None or not isinstance(prompt, list):
        return
    answer = {"role": "assistant", "content": PROBE}
    try:
        prompt, tools = messages(prompt, "prompt"), tools_of(placed.row)
        opened, closed, whole = tokenizer.render(
            [(prompt, True, tools), (prompt, False, tools), ([*prompt, answer], False, tools)]
        )
    except (DataError, TokenizerError):  # the row's own fault, which its reader names
        return
    header = whole.removeprefix(closed).partition(PROBE)[0]
    if opened == closed and whole.startswith(closed) and header.strip():
        raise DataError(
            f"{placed.where}: the chat template does not open the assistant's turn: before an answer it writes "
            f"{shown(header)}, after a prompt nothing. Add that to the template, within "
            "{% if add_generation_prompt %} ... {% endif %}."
        )


def endless(config: RunConfig, tokenizer: Tokenizer) -> str:
    """A warning where the rows are conversations and the chat template ends an answer with no token that stops the
    model; else empty."""
    if all(role.head == "scalar" for role in config.roles().values()):
        return ""
    placed = data_set(config.data).first()
    if placed is None or not any(isinstance(placed.row.get(name), list) for name in CONVERSATIONS):
        return ""
    probe = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PROBE}]
    try:
        (text,) = tokenizer.render([(probe, False)])
    except TokenizerError:  # it wants other conversations
        return ""
    end = text.rpartition(PROBE)[2]
    stops, strings = set(tokenizer.stop_ids), tuple[str, ...]()
    if isinstance(config, Samples):
        stops, strings = stops | set(config.sampling.stop_token_ids), config.sampling.stop_strings
    if PROBE not in text or stops & set(tokenizer.encode(end)) or any(string in end for string in strings):
        return ""
    stop = tokenizer.decode([tokenizer.eos_id], special_tokens=True)
    return (
        f"nothing will stop the model: after an answer its chat template writes {shown(end)}, and no end token "
        f"({shown(stop)}). Write that token there in the template, or name the one that is there in eos_token_id of "
        f"{Path(config.models.tokenizer, 'generation_config.json')}."
    )


def _ids(example: tuple) -> list[list[int]]:
    """An example's token ids."""
    return [part for part in example if isinstance(part, list)]


def _returned(reading: Reading[T], texts: list[str]) -> T:
    try:
        reading.send(texts)
    except StopIteration as end:
        return end.value
    raise AssertionError("a reader renders its conversations in one request")


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
    answer   the most tokens that are generated after a row
    """

    allowed: int
    role: str
    folder: str
    context: int
    answer: int

    @staticmethod
    def of(config: RunConfig) -> "_Limit":
        contexts = [
            (read_shape(parts.folder).context, role, parts.folder) for role, parts in config.roles().items()
        ]
        context, role, folder = min(contexts, key=lambda each: each[0])
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
