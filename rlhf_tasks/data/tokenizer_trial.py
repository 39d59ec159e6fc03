"""A tokenizer.json is read and tried in a process of its own first, with limits on its time and memory.

It comes with a model and is a program of a kind: normalizers in normalizers take gigabytes to read, a replacement may
make a million characters of one, a pattern may search for ever. What no text of the trial touches is not found.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import tokenizers

from rlhf_tasks.data.chat_template import KEPT, TokenizerError, limit
from rlhf_tasks.system.child_processes import die_with_parent, python_call
from rlhf_tasks.system.reading import reading, sentence_of

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
