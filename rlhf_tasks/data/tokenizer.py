"""Tokenizer and chat template of a Hugging Face folder, without torch or transformers.

Reads `tokenizer.json` (through the `tokenizers` package), `tokenizer_config.json`, `generation_config.json`,
`config.json` and `chat_template.jinja`, as far as they are there.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from rlhf_tasks.data.chat_template import ChatTemplate, Conversation, Source, TokenizerError
from rlhf_tasks.data.tokenizer_trial import MOST_TOKENIZER_BYTES, TokenizerFile, why_refused
from rlhf_tasks.parallel.layout.weight_files import own_or_base
from rlhf_tasks.system.reading import read_bytes, read_json, reading, shown

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
    def size(self) -> int:
        """One more than the largest token id, added tokens included: so many embeddings a model needs."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

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
        unless it begins with them already. None are put behind it: a prompt has no end.

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

    def decode(self, ids: Sequence[int], special_tokens: bool = False) -> str:
        """Text of token ids; special tokens are left out unless asked for."""
        return self._backend.decode(list(ids), skip_special_tokens=not special_tokens)

    def texts(self) -> list[bytes]:
        """The text of each token id behind other text, in UTF-8; special tokens have none.

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
                "to its folder, or give prompts as text."
            )


def _bytes_of(token: str) -> bytes:
    """The bytes of a token that is a part of a character: written as <0xE2>, or a letter for each byte (GPT-2)."""
    if token.startswith("<0x") and token.endswith(">"):
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
