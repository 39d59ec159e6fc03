"""Tokenizer and chat template of a Hugging Face folder, without torch or transformers.

Reads `tokenizer.json` (through the `tokenizers` package), `tokenizer_config.json`, `generation_config.json`,
`config.json` and `chat_template.jinja`, as far as they are there.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class TokenizerError(ValueError):
    """A tokenizer folder or a chat template that cannot be used."""


class Tokenizer:
    """Text to token ids and back.

    stop_ids  tokens that end a response; the first is `eos_id`, which training examples end with
    pad_id    never computed on by us; written to the exported generation configuration
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        stop_ids: tuple[int, ...],
        pad_id: int,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        self._backend = backend
        self.stop_ids = stop_ids
        self.pad_id = pad_id
        self._special_tokens = special_tokens
        self._template = None if chat_template is None else _environment().from_string(chat_template)

    @staticmethod
    def from_folder(folder: str | Path) -> "Tokenizer":
        """The tokenizer of a model folder.

        Raises TokenizerError when there is no tokenizer.json, it is malformed, or no end token is declared.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{folder}: has no tokenizer.json. Save the model's fast tokenizer there with "
                "transformers' `AutoTokenizer.from_pretrained(...).save_pretrained(...)`."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  the Rust library raises bare Exceptions
            raise TokenizerError(f"{path}: cannot be read as a tokenizer ({error}).") from None
        backend.no_padding()
        backend.no_truncation()
        settings = _read_json(folder / "tokenizer_config.json")
        model = _read_json(folder / "config.json")
        stop_ids = _stop_ids(backend, settings, model, _read_json(folder / "generation_config.json"))
        if not stop_ids:
            raise TokenizerError(
                f"{folder}: declares no end token. Set eos_token in tokenizer_config.json or eos_token_id in "
                "generation_config.json."
            )
        special = {
            name: _token_text(settings.get(name)) or "" for name in ("bos_token", "eos_token", "pad_token")
        }
        pad = backend.token_to_id(special["pad_token"])
        pad_id = next(i for i in (pad, model.get("pad_token_id"), stop_ids[0]) if i is not None)
        return Tokenizer(backend, stop_ids, pad_id, special, _chat_template(folder, settings))

    @property
    def eos_id(self) -> int:
        """The token that ends a response."""
        return self.stop_ids[0]

    @property
    def size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Token ids of a text; with `special_tokens`, those too that the tokenizer puts around it (BOS)."""
        return self._backend.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Sequence[int], special_tokens: bool = False) -> str:
        """Text of token ids; special tokens are left out unless asked for."""
        return self._backend.decode(list(ids), skip_special_tokens=not special_tokens)

    def render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """Text of a conversation in the model's own chat format.

        generation_prompt  True opens the assistant's turn at the end
        Raises TokenizerError when there is no template or it refuses the messages.
        """
        if self._template is None:
            raise TokenizerError(
                "the rows are conversations, but the model has no chat template. Add chat_template.jinja "
                "to its "
                "folder, or give prompts as text."
            )
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=generation_prompt, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise TokenizerError(f"the chat template refuses the messages ({error}).") from None


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers renders chat templates in: sandboxed, with the same extras."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TokenizerError(f"{path}: not valid JSON ({error}).") from None
    if not isinstance(document, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type(document).__name__}.")
    return document


def _token_text(token: Any) -> str | None:
    """A special token as tokenizer_config.json writes it: text, or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _stop_ids(
    backend: tokenizers.Tokenizer, settings: Mapping, model: Mapping, generation: Mapping
) -> tuple[int, ...]:
    """End tokens: the tokenizer's own first, then those of the generation or model configuration."""
    own = backend.token_to_id(_token_text(settings.get("eos_token")) or "")
    declared = generation.get("eos_token_id", model.get("eos_token_id"))
    more = declared if isinstance(declared, list) else [declared]
    return tuple(dict.fromkeys(i for i in (own, *more) if i is not None))


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or the (default) template inside tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template
