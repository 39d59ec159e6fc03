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
PYTHON = (3, 11)
TORCH_FOR_CPUS = "https://download.pytorch.org/whl/cpu"


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
    if folder.exists():
        raise ConfigError(f"{folder} is there, without {python.name}. Remove it, or set PREFECT_RLHF_HOME.")
    if sys.version_info[:2] != PYTHON:
        wanted, here = (".".join(map(str, version)) for version in (PYTHON, sys.version_info[:2]))
        raise ConfigError(
            f"The versions were tried together on Python {wanted}, and this is {here}. Use {wanted}."
        )
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        venv.create(unfinished, clear=True, with_pip=True)
        _install(unfinished / "bin" / "python", folder)
        _rename_interpreter(unfinished, folder)
        unfinished.rename(folder)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{unfinished}: not done after {error.timeout:.0f} s. Begin again.") from None
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"{unfinished}: cannot be made ({error}). Install Python's venv and pip, or set PREFECT_RLHF_HOME to a "
            "folder that can be written."
        ) from None
    tell(f"done: {python}")


def _install(python: Path, folder: Path) -> None:
    """Raises ConfigError where pip fails, or vLLM cannot be imported afterwards."""
    torch = next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
    tell(f"installing {REQUIREMENTS.name} into {folder}: about 3 GB")
    if _fails([*pip, torch]):
        tell(f"{torch} is not in pip's index: taken from {TORCH_FOR_CPUS}")
        if _fails([*pip, torch, "--extra-index-url", TORCH_FOR_CPUS]):
            raise ConfigError(f"pip could not install {torch}; what it said is above.")
    if _fails([*pip, "--requirement", str(REQUIREMENTS)]):
        raise ConfigError(f"pip could not install {REQUIREMENTS}; what it said is above.")
    if _fails([python, "-I", "-c", "import torch, vllm"]):
        raise ConfigError("torch and vLLM are installed, but cannot be imported; what they said is above.")


def _rename_interpreter(old: Path, new: Path) -> None:
    """Let the environment's commands (`vllm serve`) begin with the Python of the folder that it will have."""
    for script in (old / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            content = script.read_bytes()
            if content.startswith(b"#!" + bytes(old)):
                script.write_bytes(content.replace(bytes(old), bytes(new), 1))


def _fails(command: list[str | Path]) -> bool:
    return subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode != 0
