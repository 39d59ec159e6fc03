"""Runs code that a model has written, in a sandbox. Linux only.

With bubblewrap the code sees only the interpreter's files, read-only, and a folder in memory; no network, no
environment, no other process; it ends with us. In both kinds the kernel bounds its CPU time, memory, files and
processes. A program has passed only if it says so with a word that is made for it and read before its code runs: code
that ends the process early has not passed, nor has code that puts its own functions in the place of Python's. That is
no proof against code that searches its interpreter's frames for the word.
"""

import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from prefect_rlhf.rlhf_tasks.user_code.errors import RewardError

SANDBOXES = ("bwrap", "process")
MOST_FILE_BYTES, MOST_FILES, MOST_PROCESSES = 1 << 20, 64, 64  # of a program
MOST_FOLDER_BYTES = 64 << 20  # of all its files together, from bubblewrap 0.7 on
_PROGRAM = """
import json, os, resource, sys
def main(run=exec, write=os.write, leave=os._exit):  # the code may replace what these modules have
    word, end, limits, parts = json.loads(sys.stdin.buffer.read())
    for kind, most in limits:
        resource.setrlimit(kind, (most, most))
    programs = [compile(part, f"part {number}", "exec") for number, part in enumerate(parts)]
    space = {"__name__": "answer"}
    for program in programs:
        run(program, space)
    write(end, word.encode())
    leave(0)
main()
"""
_PRINTING = """
import json, resource, sys, traceback
limits, code = json.loads(sys.stdin.buffer.read())
for kind, most in limits:
    resource.setrlimit(kind, (most, most))
try:
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})
except Exception as error:
    traceback.print_exception(error.with_traceback(error.__traceback__.tb_next), file=sys.stdout)
"""


class ProgramLimits(NamedTuple):
    """What one program may take: seconds of time and of CPU, bytes of addresses."""

    seconds: float
    memory_bytes: int


def refuse_sandbox(kind: str, who: str = "reward builtin:unit_tests") -> None:
    """Raises RewardError where bubblewrap is asked for and does not work here. who: what runs the code"""
    fault = _fault() if kind == "bwrap" else ""
    if fault:
        raise RewardError(
            f"{who}: runs code that a model has written in bubblewrap, {fault}. Install it "
            "(Debian: apt-get install bubblewrap), or set sandbox: process to run it with your own rights."
        )


@cache
def _fault() -> str:
    """Why bubblewrap does not work here; "" where it does."""
    if shutil.which("bwrap") is None:
        return "which is not installed"
    tried = subprocess.run([*_bwrap(), "/bin/true"], capture_output=True, text=True, check=False, timeout=60)
    said = tried.stderr.strip().partition("\n")[0]
    return f"which does not work here ({said or tried.returncode})" if tried.returncode else ""


def _bwrap() -> list[str]:
    seen = {"/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", sys.base_prefix, sys.prefix}
    binds = [part for path in sorted(seen) if os.path.exists(path) for part in ("--ro-bind", path, path)]
    return [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-all", "--die-with-parent", "--clearenv", "--new-session"),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        *(*_folder_bound(), "--tmpfs", "/tmp"),
        *binds,  # after /tmp, which may have the Python environment
        *("--chdir", "/tmp"),
    ]


@cache
def _folder_bound() -> list[str]:
    """Bounds the bytes of the folder in memory where bubblewrap can."""
    known = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False, timeout=60)
    return ["--size", str(MOST_FOLDER_BYTES)] if "--size " in known.stdout + known.stderr else []


def runs_through(parts: Sequence[str], sandbox: str, limits: ProgramLimits) -> bool:
    """Whether the parts of a program run one after the other without raising, within the limits."""
    word = secrets.token_hex(16)
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)  # a process that has got away may hold its end open
    stated = json.dumps([word, theirs, _limits(limits), list(parts)]).encode()
    try:
        if not _ended(_PROGRAM, stated, sandbox, limits.seconds, subprocess.DEVNULL, [theirs]):
            return False
        return os.read(ours, len(word) + 1) == word.encode()
    except BlockingIOError:  # without a word
        return False
    finally:
        os.close(ours)
        os.close(theirs)


def output_of(code: str, sandbox: str, limits: ProgramLimits) -> str:
    """What a program has printed, and the traceback of what it has raised, within the limits."""
    with tempfile.TemporaryFile() as printed:
        stated = json.dumps([_limits(limits), code]).encode()
        in_time = _ended(_PRINTING, stated, sandbox, limits.seconds, printed)
        printed.seek(0)
        output = printed.read(MOST_FILE_BYTES).decode(errors="replace")
    return output if in_time else f"{output}error: the program did not end in {limits.seconds:g} s"


def _ended(
    program: str, stated: bytes, sandbox: str, seconds: float, output: Any, pass_fds: Sequence[int] = ()
) -> bool:
    """Whether a program that reads `stated` has ended in time. It is killed, with all that it has started."""
    python = [sys.executable, "-I", "-c", program]
    with subprocess.Popen(
        [*_bwrap(), *python] if sandbox == "bwrap" else python,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={},
        cwd="/",
        start_new_session=True,
        pass_fds=pass_fds,
    ) as child:
        try:
            child.communicate(stated, timeout=seconds)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _limits(limits: ProgramLimits) -> list[tuple[int, int]]:
    """Kinds of limits of a process, and their values."""
    return [
        (resource.RLIMIT_CPU, int(limits.seconds) + 1),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, MOST_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MOST_FILES),
        (resource.RLIMIT_NPROC, MOST_PROCESSES),
    ]
