"""From rows to token ids: what each algorithm reads of a row, and the check of a whole data set. Torch-free.

Rows have the columns of TRL's data set types, standard (text) or conversational (messages), or those of
verl's Parquet files. Everything an algorithm does not read itself is a further column, handed to the rewards.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from rlhf_tasks.config import AnyConfig, GRPOConfig, PPOConfig, RolloutConfig
from rlhf_tasks.dataset import DataError, Row, Rows, load_rows
from rlhf_tasks.parallel.shape import ModelShape
from rlhf_tasks.reading import one_line
from rlhf_tasks.tokenizer import Tokenizer, TokenizerError

Example = TypeVar("Example", bound=tuple)


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


def prompt_example(row: Row, tokenizer: Tokenizer) -> PromptExample:
    """`prompt` (text or messages) and any further columns. Raises DataError, without its place."""
    prompt = _column(row, "prompt")
    return PromptExample(
        _prompt_ids(prompt, tokenizer), json.dumps(dict(row), ensure_ascii=False, default=str)
    )


def completion_example(row: Row, tokenizer: Tokenizer) -> CompletionExample:
    """`prompt` + `completion`, `messages` (the last one is learned), or `text` (all of it is learned).

    Raises DataError, without its place.
    """
    if "messages" in row:
        messages = _messages(row["messages"], "messages")
        prompt, completion = _turn_ids(messages[:-1], messages[-1:], tokenizer)
    elif "text" in row:
        ids = _ended(tokenizer.encode(_text(row["text"], "text"), special_tokens=True), tokenizer)
        prompt, completion = [], ids
    else:
        prompt, completion = _answer_ids(_column(row, "prompt"), _column(row, "completion"), tokenizer)
    if not prompt:  # nothing stands before the first token to predict it from
        prompt, completion = completion[:1], completion[1:]
    if not completion:
        raise DataError("has nothing to learn: the completion is empty.")
    return CompletionExample(prompt + completion, len(prompt))


def pair_example(row: Row, tokenizer: Tokenizer) -> PairExample:
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
    ids = [first + then for first, then in (_answer_ids(prompt, a, tokenizer) for a in (chosen, rejected))]
    if not all(ids):
        raise DataError("has an empty answer.")
    return PairExample(*ids)


def load_and_check(config: AnyConfig) -> tuple[Rows, Tokenizer]:
    """The data set and the tokenizer of a run, every row checked: its columns and its length.

    Raises DataError (naming file:line) or TokenizerError.
    """
    tokenizer = Tokenizer.from_folder(config.models.tokenizer)
    rows = load_rows(config.data)
    context = _shortest_context(config)
    for index in range(len(rows)):
        example = read_example(READERS[config.type], rows, index, tokenizer)
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
    examples = (read_example(READERS[config.type], rows, index, tokenizer) for index in looked_at)
    return sum(len(ids) for e in examples for ids in e if isinstance(ids, list)) / len(looked_at)


def read_example(
    reader: Callable[[Row, Tokenizer], Example], rows: Rows, index: int, tokenizer: Tokenizer
) -> Example:
    """One row as an example. Raises DataError that names its place."""
    try:
        return reader(rows[index], tokenizer)
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


def _prompt_ids(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, special_tokens=True)
    else:
        ids = tokenizer.encode(tokenizer.render(_messages(prompt, "prompt"), generation_prompt=True))
    if not ids:
        raise DataError("has an empty prompt.")
    return ids


def _answer_ids(prompt: Any, answer: Any, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of one answer to it, the answer with its end token."""
    if isinstance(prompt, str) and isinstance(answer, str):
        return tokenizer.encode(prompt, special_tokens=True), _ended(tokenizer.encode(answer), tokenizer)
    if isinstance(prompt, str):
        raise DataError("prompt is text, but its answer is not. Give both as text or both as messages.")
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return _turn_ids(_messages(prompt, "prompt") if prompt else [], _messages(answer, "answer"), tokenizer)


def _turn_ids(before: list, turn: list, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and of the turn that follows it."""
    opening = tokenizer.render(before, generation_prompt=True) if before else ""
    whole = tokenizer.render([*before, *turn], generation_prompt=False)
    if not whole.startswith(opening):
        raise DataError(
            "the chat template changes earlier turns when one is added, so answers cannot be told apart."
        )
    return tokenizer.encode(opening), tokenizer.encode(whole[len(opening) :])


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids with an end token at their end."""
    return ids if ids and ids[-1] in tokenizer.stop_ids else [*ids, tokenizer.eos_id]


READERS: dict[str, Callable[[Row, Tokenizer], tuple]] = {
    "ppo": prompt_example,
    "grpo": prompt_example,
    "rollout": prompt_example,
    "sft": completion_example,
    "reward_model": pair_example,
}
