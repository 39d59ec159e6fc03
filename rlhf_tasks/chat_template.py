"""Chat templates, rendered in a process of their own with limits on its time, memory and output.

A template comes with a model and is a program: its sandbox keeps it from files and functions, but not from loops in
loops or from a text of 20 GB. One process serves all conversations of a tokenizer. Each request and each answer is
one line of JSON; the process ends when its standard input closes.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlhf_tasks.reading import ConfigError, reading

Message = Mapping[str, Any]

MOST_MEMORY_BYTES = 1 << 30  # of the process's addresses
MOST_CHARACTERS = 8 << 20  # of a rendered conversation
FIRST_CPU_S, EACH_CPU_S = 3.0, 0.02
"""What the process may take: at first, for its start and one slow conversation, and for each conversation more. On
the mean they take a hundredth of that."""
DEADLINE_S = 200.0  # for an answer: only a machine that stands still takes so long

_KEPT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TZ")  # of the environment: it may hold secrets
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rlhf_tasks.chat_template import serve; serve(sys.stdin.buffer, sys.stdout.buffer)"
)


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
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """Text of a conversation. Raises TokenizerError where the template is none, refuses the messages, or takes
        more than its process may."""
        request = {"messages": messages, "generation_prompt": generation_prompt}
        process = self._started()
        answer = _exchange(process, json.dumps(request, default=str).encode() + b"\n")
        if not answer:
            self._process = None
            raise TokenizerError(f"{self._source.where}: the chat template {_end_of(process)}.")
        answered = json.loads(answer)
        if "error" in answered:
            raise TokenizerError(answered["error"])
        return answered["text"]

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
                start_new_session=True,  # Ctrl-C is the run's to handle
            )
            weakref.finalize(self, _kill, process)
            source = self._source
            stated = [source.text, str(source.file), source.whole, self._special_tokens]
            _write(process, json.dumps(stated).encode() + b"\n")
        return self._process


def _write(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended: there will be no answer
        process.stdin.write(line)
        process.stdin.flush()


def _exchange(process: "subprocess.Popen[bytes]", line: bytes) -> bytes:
    """The process's answer to a line; empty, and the process ended, when there is none."""
    assert process.stdout is not None
    _write(process, line)
    deadline, answer = time.monotonic() + DEADLINE_S, bytearray()
    while not answer.endswith(b"\n"):
        left_s = max(0.0, deadline - time.monotonic())
        ready = wait([process.stdout.fileno()], left_s)  # select takes no file numbers from 1024 on
        piece = os.read(process.stdout.fileno(), 1 << 20) if ready else b""
        if not piece:
            if not ready:
                process.kill()
            process.wait()
            return b""
        answer += piece
    return bytes(answer)


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


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """The process's own life: read a template, then render conversations until standard input closes."""
    text, file, whole, special_tokens = json.loads(requests.readline())
    source = Source(text, Path(file), whole)
    _limit(resource.RLIMIT_AS, MOST_MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    template: Template | None = None
    for number, line in enumerate(requests):
        _limit(resource.RLIMIT_CPU, math.ceil(FIRST_CPU_S + EACH_CPU_S * number))
        request = json.loads(line)
        variables = {"add_generation_prompt": request["generation_prompt"], **special_tokens}
        try:
            if template is None:
                with reading(source.where, "no valid chat template", TokenizerError):
                    template = _environment().from_string(source.text)
            with reading(str(source.where), "the chat template refuses the messages", TokenizerError):
                answer = {"text": _bounded(template.generate(messages=request["messages"], **variables))}
        except TokenizerError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _limit(kind: int, most: int) -> None:
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
