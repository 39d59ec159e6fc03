"""`prefect-rlhf setup`: the environment of an engine that cannot live in this one."""

import subprocess
import sys
import venv
from pathlib import Path

from prefect_rlhf.flows.view.terminal import tell
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
from prefect_rlhf.rlhf_tasks.config.generation import VLLM, default_python

REQUIREMENTS = Path(__file__).parents[2] / "deployments" / "vllm-requirements.txt"
TIMEOUT_S = 3600.0


def setup(engine: str) -> None:
    """Make the environment of an engine: `vllm`, for CPUs, with the versions that were tried together.

    Parameters
    ----------
    engine
        vllm. Its environment is in ~/.prefect-rlhf (or PREFECT_RLHF_HOME), where generation.engine=vllm finds it.
    """
    if engine != VLLM:
        raise ConfigError(f"There is no environment to make for {engine!r}. Name {VLLM}.")
    python = Path(default_python())
    folder = python.parents[1]
    if python.is_file():
        raise ConfigError(f"{folder} is there already. Remove it to make it anew.")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        venv.create(unfinished, clear=True, with_pip=True)
    except OSError as error:
        raise ConfigError(
            f"{unfinished}: cannot be made ({error}). Set PREFECT_RLHF_HOME to a folder."
        ) from None
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(REQUIREMENTS)]
    tell(f"installing {REQUIREMENTS.name} into {folder}: about 3 GB")
    done = subprocess.run([unfinished / "bin" / "python", *install], timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise ConfigError(f"pip could not install {REQUIREMENTS}; what it said is above.")
    unfinished.rename(folder)
    tell(f"done: {python} (Python {sys.version_info.major}.{sys.version_info.minor})")
