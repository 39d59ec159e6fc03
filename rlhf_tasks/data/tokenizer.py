"""Tokenizer and chat template of a Hugging Face folder, without torch or transformers.

Reads `tokenizer.json` (through the `tokenizers` package), `tokenizer_config.json`, `generation_config.json`,
`config.json` and `chat_template.jinja`, as far as they are there.

A tokenizer.json is read and tried in a process of its own first, with limits on its time and memory. It comes with a
model and is a program of a kind: normalizers in normalizers take gigabytes to read, a replacement may make a million
characters of one, a pattern may search for ever. What no text of the trial touches is not found.
"""

import hashlib
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from prefect_rlhf.rlhf_tasks.data.chat_template import (
    KEPT,
    ChatTemplate,
    Conversation,
    Source,
    TokenizerError,
    limit,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import own_or_base
from prefect_rlhf.rlhf_tasks.system.child_processes import die_with_parent, python_call
from prefect_rlhf.rlhf_tasks.system.reading import read_bytes, read_json, reading, sentence_of, shown

MOST_TOKENIZER_BYTES = 1 << 30  # the largest have 40 MB
CPU_S, CPU_S_PER_BYTE = 6.0, 1e-6
"""What reading and trying may take: 3.5 MB take .2 s."""
MEMORY_BYTES, MEMORY_PER_BYTE = 1 << 30, 24
"""Of the process's addresses; 3.5 MB take 60 MB."""
DEADLINE_S = 300.0  # only a machine that stands still takes so long
MOST_GROWTH = 32
"""Tokens of a byte of text, or characters that come back: more is made to fill memory."""
TRIAL_CHARACTERS = 1 << 16
_PASSAGE = (
    "The quick brown fox jumps over the lazy dog; it's 3.14159 o'clock -- \"SPHINX of BLACK quartz, judge my VOW!\"\n"
    "def f(x): return {x: [1, 22, 333, 4_444]}  # a@b.org, https://example.org/?q=1&r=2 <tag/> $100 50% ~^`\\|\t\r\n"
    "Zw\u00f6lf Boxk\u00e4mpfer; \u00c5ngstr\u00f6m, \u0441\u043b\u043e\u0432\u043e, \u4e2d\u6587\u5b57, "
    "\u65e5\u672c\u8a9e, \ud55c\uad6d\uc5b4, \u0639\u0631\u0628\u064a, \u0939\u093f\u0928\u094d\u0926\u0940, "
    "\U0001f44d\U0001f3fd, \ufb01 \u00bd \u2212 \u2026 \u00a0\u3000\u200b\n\n    "
)
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
MOST_TEMPLATE_BYTES = 1 << 20

NO_CHARACTER = "\ufffd"  # what bytes that are no character are decoded to


def _letters() -> dict[str, int]:
    """Letter -> byte, as GPT-2's byte-level tokens are written: printable ones stand for themselves, the others are
    numbered from 256."""
    themselves = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_LETTER = _letters()


class Tokenizer:
    """Text to token ids and back.

    folder    what sentences about it name
    stop_ids  tokens that end a response; the first is `eos_id`, which training examples end with
    pad_id    never computed on by us; written to the exported generation configuration
    """

    def __init__(
        self,
        folder: Path,
        backend: tokenizers.Tokenizer,
        stop_ids: tuple[int, ...],
        pad_id: int,
        chat_template: ChatTemplate | None,
    ) -> None:
        self._file, self._backend = folder / "tokenizer.json", backend
        self.stop_ids = stop_ids
        self.pad_id = pad_id
        self._template = chat_template

    @staticmethod
    def from_folder(folder: str | Path) -> "Tokenizer":
        """The tokenizer of a model folder.

        Raises TokenizerError when there is no tokenizer.json, it is malformed, or no end token is declared.
        """
        folder = Path(folder)
        path = own_or_base(folder, "tokenizer.json")
        if not path.is_file():
            raise TokenizerError(
                f"{folder}: has no tokenizer.json. Save the model's fast tokenizer there with "
                "transformers' `AutoTokenizer.from_pretrained(...).save_pretrained(...)`."
            )
        backend = _backend(path)
        backend.no_padding()
        backend.no_truncation()
        names = ("tokenizer_config.json", "config.json", "generation_config.json")
        settings, model, generation = (_Declared.of(own_or_base(folder, name)) for name in names)
        special = {name: settings.token(name) for name in ("bos_token", "eos_token", "pad_token")}
        own = backend.token_to_id(special["eos_token"])
        declared = generation.ids("eos_token_id") or model.ids("eos_token_id")
        stop_ids = tuple(dict.fromkeys(i for i in (own, *declared) if i is not None))
        if not stop_ids:
            raise TokenizerError(
                f"{folder}: declares no end token. Set eos_token in tokenizer_config.json or eos_token_id in "
                "generation_config.json."
            )
        pad = backend.token_to_id(special["pad_token"])
        pad_id = next(i for i in (pad, *model.ids("pad_token_id"), stop_ids[0]) if i is not None)
        source = _chat_template(path.parent, settings)
        template = None if source is None else ChatTemplate(source, special)
        return Tokenizer(path.parent, backend, stop_ids, pad_id, template)

    @property
    def eos_id(self) -> int:
        """The token that ends a response."""
        return self.stop_ids[0]

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` can write conversations."""
        return self._template is not None

    @property
    def size(self) -> int:
        """One more than the largest token id, added tokens included: so many embeddings a model needs."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token; a text has no more per token."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def refuse_other(self, folder: str | Path) -> None:
        """Raises TokenizerError unless each token has the same id in another folder's tokenizer, if that has one."""
        path = own_or_base(Path(folder), "tokenizer.json")
        if not path.is_file() or path.read_bytes() == self._file.read_bytes():
            return
        theirs = _backend(path).get_vocab(with_added_tokens=True)
        for token, number in self._backend.get_vocab(with_added_tokens=True).items():
            if theirs.get(token) != number:
                raise TokenizerError(
                    f"{path}: differs from {self._file}: the token {shown(token)} has the id {number} there and "
                    f"{theirs.get(token, 'none')} here. All models of a run must share the actor's tokenizer."
                )

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Token ids of a text; with `special_tokens`, behind those that the tokenizer puts before a text (BOS),
        unless it begins with them already. None are put after it: a prompt has no end.

        Raises TokenizerError where it has no token for a part of the text.
        """
        with reading(str(self._file), "it does not take the text", TokenizerError):
            encoded = self._backend.encode(text, add_special_tokens=special_tokens)
        if not special_tokens:
            return encoded.ids
        # The mask is 1 where the tokenizer has put one, and 0 where the text itself has it.
        own = [place for place, put in enumerate(encoded.special_tokens_mask) if not put]
        first, stop = (own[0], own[-1] + 1) if own else (1, 1)
        before, of_text = encoded.ids[:first], encoded.ids[first:stop]
        return of_text if of_text[: len(before)] == before else before + of_text

    def without_special(self, text: str) -> str:
        """A text with a space behind the first character of each special token, which is then none."""
        return self._special.sub(lambda token: f"{token[0][0]} {token[0][1:]}", text)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self._backend.get_added_tokens_decoder().values()
        texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def decode(self, ids: Sequence[int], special_tokens: bool = False) -> str:
        """Text of token ids; special tokens are left out unless asked for."""
        return self._backend.decode(list(ids), skip_special_tokens=not special_tokens)

    def is_byte(self, token: int) -> bool:
        """Whether a token is written as <0xE2>: its text depends on such tokens beside it."""
        return _is_byte(self._backend.id_to_token(token) or "")

    def texts(self) -> list[bytes]:
        """The text of each token id after other text, in UTF-8; special tokens have none.

        A token may be a part of a character only: then these are its bytes.
        """
        ids = range(self.size)
        once, twice = (
            self._backend.decode_batch([[i] * times for i in ids], skip_special_tokens=True)
            for times in (1, 2)
        )
        # At the start of a text some tokenizers leave out a space: what a second one adds is the token's text.
        added = [
            two.removeprefix(one) if two.startswith(one) else one
            for one, two in zip(once, twice, strict=True)
        ]
        return [
            _bytes_of(self._backend.id_to_token(i) or "") if NO_CHARACTER in text else text.encode()
            for i, text in zip(ids, added, strict=True)
        ]

    def turns(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts to answer: each a user's turn in the model's chat format, where it has one.

        No special token in a text is one. Raises TokenizerError as `encode` and `render` do.
        """
        said = [self.without_special(text) for text in texts]
        if self.has_chat_template:
            said = self.render([([{"role": "user", "content": each}], True) for each in said])
        return [self.encode(each, special_tokens=not self.has_chat_template) for each in said]

    def render(self, conversations: Sequence[Conversation]) -> Iterator[str]:
        """Texts of conversations in the model's own chat format.

        Raises TokenizerError when there is no template, it refuses the messages or takes too much of the machine; in
        place of the text of the conversation that it is about.
        """
        if self._template is not None:
            yield from self._template.render(conversations)
        elif conversations:
            raise TokenizerError(
                "the rows are conversations, but the model has no chat template. Add chat_template.jinja "
                "to its folder, or give prompts as text, without data.as_messages."
            )


def _is_byte(token: str) -> bool:
    return token.startswith("<0x") and token.endswith(">")


def _bytes_of(token: str) -> bytes:
    """The bytes of a token that is a part of a character: written as <0xE2>, or a letter for each byte (GPT-2)."""
    if _is_byte(token):
        return bytes([int(token[3:-1], 16)])
    if all(letter in BYTE_OF_LETTER for letter in token):
        return bytes(BYTE_OF_LETTER[letter] for letter in token)
    return token.encode()


def _backend(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json. Raises TokenizerError where it is none, or is one that takes too much of the machine."""
    with reading(path, "cannot be read as a tokenizer", TokenizerError):
        content = read_bytes(path, MOST_TOKENIZER_BYTES)
        refused = why_refused(TokenizerFile(hashlib.sha256(content).digest(), len(content), path))
        if refused:
            raise ValueError(refused)
        return tokenizers.Tokenizer.from_buffer(content)


class _Declared:
    """What one of a folder's JSON files says of tokens; nothing where there is no such file."""

    def __init__(self, path: Path, document: Mapping[str, Any]) -> None:
        self.path, self.document = path, document

    @staticmethod
    def of(path: Path) -> "_Declared":
        """Raises TokenizerError for a file that is there and holds no JSON object."""
        return _Declared(path, read_json(path, TokenizerError) if path.is_file() else {})

    def token(self, name: str) -> str:
        """A special token: text, or an object with `content`; empty where there is none."""
        value = self.document.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            return ""
        if not isinstance(text, str):
            raise TokenizerError(f"{self.path}: {name}={shown(value)} is no text.")
        return text

    def ids(self, name: str) -> list[int]:
        """Ids of tokens: a number or a list. Below 0 they mean that there is none."""
        value = self.document.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and i < 2**31 for i in found):
            raise TokenizerError(
                f"{self.path}: {name}={shown(value)} is neither a token's id nor a list of them."
            )
        return [i for i in found if i >= 0]


def _chat_template(folder: Path, settings: _Declared) -> Source | None:
    """chat_template.jinja, or the (default) template inside tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        with reading(file, "cannot be read", TokenizerError):
            return Source(read_bytes(file, MOST_TEMPLATE_BYTES).decode(), file)
    stated = settings.document.get("chat_template")
    if isinstance(stated, list):  # several named ones
        default = (e for e in stated if isinstance(e, dict) and e.get("name") == "default")
        stated = next(default, {}).get("template")
    if stated is not None and not isinstance(stated, str):
        raise TokenizerError(f"{settings.path}: chat_template={shown(stated)} is no text.")
    return None if stated is None else Source(stated, settings.path, whole=False)


def template_of(folder: str | Path) -> str:
    """The text of a folder's chat template; "" where it has none. Raises TokenizerError where it cannot be read."""
    path = own_or_base(Path(folder), "tokenizer.json")
    source = _chat_template(path.parent, _Declared.of(own_or_base(Path(folder), "tokenizer_config.json")))
    return "" if source is None else source.text


_ASKED, _SAID, _NEXT = (
    "c1q0",
    "c2a7",
    "c3q5",
)  # stand for turns, to see what the template writes around the last one


class Observations:
    """The tokens of observations after a turn that the model has drawn.

    Behind a prompt that is text, an observation is this text alone. Behind a conversation it is the user's turn in
    the model's chat template, with all that the template writes from the end of the assistant's text on, up to where
    the next answer begins. What tools answer is written as after a turn of calls.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._around: tuple[str, str] | None = None

    def ids(self, text: str | Sequence[Mapping[str, str]], prompt: Any, last: int) -> list[int]:
        """Token ids of an observation.

        text    or answers of tools to the calls of a turn: `name` and `id` of the call, and `content`
        prompt  of its row: text, or messages
        last    the token that the model has drawn last. Where it is the template's own end of a turn, that is not
                written again
        Raises TokenizerError where the tokenizer has no token for a part of the text, and where the chat template
        does not write the turns of a conversation one after another.
        """
        if not isinstance(text, str):
            return self._of_tools(text, last)
        if isinstance(prompt, str):
            return self._tokenizer.encode(text)
        before, after = self._written()
        ids = self._tokenizer.encode(f"{before}{text}{after}")
        return ids[1:] if ids[:1] == [last] else ids

    def _of_tools(self, answers: Sequence[Mapping[str, str]], last: int) -> list[int]:
        """What the template writes from the end of a turn of calls on, up to where the next turn begins."""
        said = {"name": answers[0]["name"], "arguments": {"value": _SAID}}
        call = {"id": answers[0]["id"], "type": "function", "function": said}
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": _ASKED},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        turns += [
            {
                "role": "tool",
                "name": each["name"],
                "tool_call_id": each["id"],
                "content": self._tokenizer.without_special(each["content"]),  # it must not begin another role
            }
            for each in answers
        ]
        (text,) = self._tokenizer.render([(turns, True)])
        _, called, rest = text.partition(_SAID)
        ends = (self._tokenizer.decode([i], special_tokens=True) for i in self._tokenizer.stop_ids)
        places = [rest.find(end) for end in ends if end in rest]
        if not called or not places:
            raise TokenizerError(
                "the chat template does not write calls of tools, with an end token after them, so tools cannot "
                "answer. Choose a model that was trained with tools, or correct the template."
            )
        ids = self._tokenizer.encode(rest[min(places) :])
        return ids[1:] if last in self._tokenizer.stop_ids else ids

    def _written(self) -> tuple[str, str]:
        """What the template writes before and after a user's turn that follows the assistant's text."""
        if self._around is None:
            asked: Sequence[dict[str, str]] = [
                {"role": "user", "content": _ASKED},
                {"role": "assistant", "content": _SAID},
                {"role": "user", "content": _NEXT},
            ]
            (text,) = self._tokenizer.render([(asked, True)])
            before, found, after = text.partition(_SAID)[2].partition(_NEXT)
            if not found:
                raise TokenizerError(
                    "the chat template does not write a user's turn after the assistant's, so an environment cannot "
                    "answer. Correct the template, or give prompts as text."
                )
            self._around = (before, after)
        return self._around


@dataclass(frozen=True)
class TokenizerFile:
    """A file of a content, which is tried once in a process."""

    digest: bytes
    size: int
    path: Path = field(compare=False)


@lru_cache(maxsize=256)
def why_refused(file: TokenizerFile) -> str:
    """Why a tokenizer.json cannot be used within the limits, as the rest of a sentence; empty where it can."""
    cpu_s = math.ceil(CPU_S + CPU_S_PER_BYTE * file.size)
    memory = MEMORY_BYTES + MEMORY_PER_BYTE * file.size
    call = python_call(
        f"{__name__}:{serve.__name__}", str(file.path), str(cpu_s), str(memory), str(os.getpid())
    )
    try:
        ended = subprocess.run(
            call,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in KEPT if name in os.environ} | ONE_THREAD,
            start_new_session=True,  # Ctrl-C is the run's to handle
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it was not read and tried in {DEADLINE_S:g} s"
    takes = f"to read it and to try it on {TRIAL_CHARACTERS:,} characters takes"
    if ended.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"{takes} more than {cpu_s} s of CPU time"
    if ended.returncode:
        return f"{takes} more than {memory:,} bytes of memory, or its process has failed ({ended.returncode})"
    return json.loads(ended.stdout)


def serve(path: str, cpu_s: str, memory: str, parent: str) -> None:
    """The process's own life: read the tokenizer and try it, and say what is wrong with it."""
    die_with_parent(int(parent))
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, int(memory))
    limit(resource.RLIMIT_CPU, int(cpu_s))
    try:
        with reading("", "", TokenizerError):
            tokenizer = tokenizers.Tokenizer.from_file(path)
    except TokenizerError as error:  # said here, since a panic of Rust also writes to the terminal
        found = sentence_of(error.__context__ or error)
    else:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        found = next(filter(None, (_grown(tokenizer, most) for most in (512, TRIAL_CHARACTERS))), "")
    sys.stdout.write(json.dumps(found))


def _grown(tokenizer: tokenizers.Tokenizer, most: int) -> str:
    """What is wrong with how it writes a text of so many characters; empty where nothing is."""
    text = (_PASSAGE * (most // len(_PASSAGE) + 1))[: most // 2] + "a" * (most // 4) + " " * (most // 4)
    size = len(text.encode())
    try:
        with reading("", "", TokenizerError):
            ids = tokenizer.encode(text).ids
            if len(ids) > MOST_GROWTH * size:
                return f"it makes {len(ids):,} tokens of {size:,} bytes of text"
            decoded = len(tokenizer.decode(ids, skip_special_tokens=False))
    except TokenizerError as error:
        fault = error.__context__ or error
        if isinstance(
            fault, Exception
        ):  # it has no tokens for a part: a fault of a text, where one has that part
            return ""
        return f"it fails on a text: {sentence_of(fault)}"  # a panic of Rust
    return f"it makes {decoded:,} characters of {len(ids):,} tokens" if decoded > MOST_GROWTH * size else ""
