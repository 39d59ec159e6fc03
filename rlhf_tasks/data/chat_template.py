"""Chat templates, rendered in a process of their own with limits on its time, memory and output.

A template comes with a model and is a program: its sandbox keeps it from files and functions, but not from loops in
loops or from a text of 20 GB. One process serves all conversations of a tokenizer. A request is one line of JSON with
many conversations; each of them is answered by a line of its own, so that a process that ends shows which one it
ended on. The first that fails is the last to be answered. The process ends when its standard input closes.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prefect_rlhf.rlhf_tasks.system.child_pipes import Lines
from prefect_rlhf.rlhf_tasks.system.child_processes import python_call, wake_after_parent
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, reading

Message = Mapping[str, Any]
Conversation = tuple[Sequence[Message], bool] | tuple[Sequence[Message], bool, Sequence[Any]]
"""Messages, whether the assistant's turn is opened after them, and JSON schemas of tools where some are offered."""

MOST_MEMORY_BYTES = 1 << 30  # of the process's addresses
MOST_CHARACTERS = 8 << 20  # of a rendered conversation
FIRST_CPU_S, EACH_CPU_S = 3.0, 0.02
"""What the process may take: at first, for its start and one slow conversation, and for each conversation more. On
the mean they take a hundredth of that."""
DEADLINE_S = (
    200.0  # for taking a request, and for each answer: only a machine that stands still takes so long
)
MOST_AT_ONCE, FULL_CHARACTERS = 256, 256 << 10
"""A request has so many conversations at most, and no further one where it has so many characters."""

KEPT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ")  # of the environment: it may hold secrets


class TokenizerError(ConfigError):
    """A tokenizer folder or a chat template that cannot be used."""


@dataclass(frozen=True)
class Source:
    """A template's text, the file that it stands in, and whether it is all of that file."""

    text: str
    file: Path
    whole: bool = True

    @property
    def where(self) -> Path | str:
        """What a sentence about it begins with; a path where a line of the template is one of the file."""
        return self.file if self.whole else f"{self.file}: chat_template"


class ChatTemplate:
    """A template and the process that renders it, which starts with the first conversation.

    special_tokens  name -> text, as templates use them: bos_token, eos_token, pad_token
    """

    def __init__(self, source: Source, special_tokens: Mapping[str, str]) -> None:
        self._source, self._special_tokens = source, dict(special_tokens)
        self._lines: Lines | None = None

    def render(self, conversations: Iterable[Conversation]) -> Iterator[str]:
        """Texts of conversations.

        Raises TokenizerError where the template is none, refuses the messages, or takes more than its process may; in
        place of the text of the conversation that it is about.
        """
        for request in _requests(conversations):
            lines, self._lines = self._started(), None  # nobody else reads the answers, nor those left unread
            _send(lines, f"[{','.join(request)}]")
            for left in reversed(range(len(request))):
                answer = self._answer(lines)
                if left == 0 or "error" in answer:
                    self._lines = lines
                if "error" in answer:
                    raise TokenizerError(answer["error"])
                yield answer["text"]

    def _answer(self, lines: Lines) -> dict[str, str]:
        try:
            answer = lines.read(time.monotonic() + DEADLINE_S)
        except TimeoutError:
            lines.child.kill()
            answer = None
        if answer is None:
            lines.child.wait()
            raise TokenizerError(f"{self._source.where}: the chat template {_end_of(lines.child)}.")
        return answer

    def _started(self) -> Lines:
        if self._lines is not None:
            return self._lines
        child = subprocess.Popen(
            python_call(f"{__name__}:{serve.__name__}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in KEPT if name in os.environ},
            start_new_session=True,  # Ctrl-C is the run's to handle
        )
        lines, source = Lines(child), self._source
        weakref.finalize(lines, _kill, child)
        stated = [source.text, str(source.file), source.whole, self._special_tokens]
        _send(lines, json.dumps(stated))
        return lines


def _send(lines: Lines, line: str) -> None:
    try:
        lines.send(line, time.monotonic() + DEADLINE_S)
    except TimeoutError:  # there will be no answer, which says so
        lines.child.kill()


def _requests(conversations: Iterable[Conversation]) -> Iterator[list[str]]:
    """Conversations as JSON, as many as one request has."""
    taken, characters = list[str](), 0
    for conversation in conversations:
        taken.append(json.dumps(conversation, default=str))
        characters += len(taken[-1])
        if len(taken) == MOST_AT_ONCE or characters >= FULL_CHARACTERS:
            yield taken
            taken, characters = [], 0
    if taken:
        yield taken


def _end_of(process: "subprocess.Popen[bytes]") -> str:
    """Why a process of templates has ended, as the rest of a sentence."""
    if process.returncode == -signal.SIGXCPU:
        return f"takes more than {FIRST_CPU_S:g} s of CPU time for a conversation"
    if process.returncode == -signal.SIGKILL:
        return f"gave no text in {DEADLINE_S:g} s, or its process was killed"
    return f"ended its process (status {process.returncode}), for want of memory maybe"


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # what was not written is of no use to a dead process
            pipe.close()


def serve() -> None:
    """The process's own life: read a template, then render conversations until standard input closes."""
    wake_after_parent(os.getppid(), lambda: os._exit(1))
    render_all(sys.stdin.buffer, sys.stdout.buffer)


def render_all(requests: BinaryIO, answers: BinaryIO) -> None:
    """Read a template, then render conversations until there are no more."""
    text, file, whole, special_tokens = json.loads(requests.readline())
    source = Source(text, Path(file), whole)
    limit(resource.RLIMIT_AS, MOST_MEMORY_BYTES)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    template: Template | None = None
    numbers = count()
    for line in requests:
        for messages, generation_prompt, *offered in json.loads(line):
            limit(resource.RLIMIT_CPU, math.ceil(FIRST_CPU_S + EACH_CPU_S * next(numbers)))
            tools = offered[0] if offered and offered[0] else None
            variables = {"add_generation_prompt": generation_prompt, "tools": tools, **special_tokens}
            try:
                if template is None:
                    with reading(source.where, "no valid chat template", TokenizerError):
                        template = _environment().from_string(source.text)
                with reading(str(source.where), "the chat template refuses the messages", TokenizerError):
                    answer = {"text": _bounded(template.generate(messages=messages, **variables))}
            except TokenizerError as error:
                answer = {"error": str(error)}
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()
            if "error" in answer:
                break


def limit(kind: int, most: int) -> None:
    """Set a limit of this process; a lower one that it has already stays."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _bounded(pieces: Any) -> str:
    taken, characters = [], 0
    for piece in pieces:
        characters += len(piece)
        if characters > MOST_CHARACTERS:
            raise ValueError(f"it makes more than {MOST_CHARACTERS:,} characters of them")
        taken.append(piece)
    text = "".join(taken)
    text.encode()  # half of a surrogate pair is no text
    return text


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` around what an assistant says: rendered as what stands in it."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Macro) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that transformers renders chat templates in: sandboxed, with the same extras."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
