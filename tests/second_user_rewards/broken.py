"""Rewards that go wrong, each in its own way."""

import os
import re
import subprocess
import sys
import time


def raises(completions, ground_truth, **kwargs):
    return [_parse(truth) for truth in ground_truth]


def _parse(truth):
    return {"one": 1.0}[truth]


def raises_on_one(completions, prompts, **kwargs):
    return [1 / (prompt != "What is 10 + 5?") for prompt in prompts]


def leaves(completions, **kwargs):
    sys.exit("no key")


def exits(completions, **kwargs):
    os._exit(3)


def crashes(completions, **kwargs):
    os.kill(os.getpid(), 11)


def kills_itself(completions, **kwargs):
    os.kill(os.getpid(), 9)


def hangs(completions, **kwargs):
    time.sleep(600)


def stuck_in_a_regex(completions, **kwargs):
    """Holds the interpreter for hours."""
    return [float(bool(re.match(r"(a+)+$", "a" * 60 + "b"))) for _ in completions]


async def waits_for_ever(completions, **kwargs):
    import asyncio

    await asyncio.sleep(600)


def nan(completions, **kwargs):
    return [0.0] * (len(completions) - 1) + [float("nan")]


def infinite(completions, **kwargs):
    return [float("inf")] * len(completions)


def nothing(completions, **kwargs):
    return None


def no_opinion(completions, **kwargs):
    return [None] * len(completions)


def short(completions, **kwargs):
    return [1.0]


def text(completions, **kwargs):
    return ["0.5"] * len(completions)


def number(completions, **kwargs):
    return 1.0


def huge(completions, **kwargs):
    return [10**400] * len(completions)


def nested(completions, **kwargs):
    return [[1.0, 2.0]] * len(completions)


def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}


def forks(completions, **kwargs):
    """The child comes back out of it too."""
    os.fork()
    return [1.0] * len(completions)


def takes_memory(completions, **kwargs):
    block = bytearray()
    while True:
        block += b"x" * (64 << 20)


def starts_a_process(completions, pid_file, **kwargs):
    """What it starts has a session of its own, and its parent ends."""
    code = (
        "import subprocess, sys; quiet = subprocess.DEVNULL; "
        "print(subprocess.Popen(['sleep', '600'], stdout=quiet, start_new_session=True).pid)"
    )
    out = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
    with open(pid_file, "ab") as file:
        file.write(out)
    return [1.0] * len(completions)


def prints(completions, **kwargs):
    print("a reward may print")
    os.write(1, b"also in this way\n")
    return [1.0] * len(completions)


def odd(first, second):
    return []


def lacks_a_column(completions, nowhere, **kwargs):
    return [1.0] * len(completions)


def tells_its_key(completions, api_key, **kwargs):
    print(f"calling with {api_key}")
    raise RuntimeError(f"401 Unauthorized: {api_key}")


def looks_for(completions, text, **kwargs):
    """1 where the environment has it."""
    return [float(any(text in value for value in os.environ.values()))] * len(completions)


constant = 7
