"""The section that names what draws responses. Torch-free."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from prefect_rlhf.rlhf_tasks.config.settings import Pair, Settings
from prefect_rlhf.rlhf_tasks.parallel.generate.beside import SECONDS_A_TOKEN, STALL_S, START_S
from prefect_rlhf.rlhf_tasks.system.wires import HEADER_VALUE

BUILT_IN, VLLM, OPENAI = "builtin", "vllm", "openai"
MODULE = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


class GenerationConfig(Settings):
    """What draws responses, in training and in evaluations (docs/adr/0028-generators.md)."""

    engine: str = Field(
        default=BUILT_IN,
        pattern=rf"^({BUILT_IN}|{VLLM}|{OPENAI}|{MODULE})$",
        description="builtin; vllm (in a process of its own, as `prefect-rlhf setup vllm` installs it); openai (a "
        "server of vLLM or SGLang that runs somewhere); or module:Class of an engine of yours.",
    )
    python: str | None = Field(
        default=None,
        description="With vllm: the Python of the environment that has it; default: that of `prefect-rlhf setup "
        "vllm`.",
    )
    kv_bytes: int = Field(
        default=2**30,
        gt=0,
        le=2**50,
        description="With vllm: bytes of the keys and values that it keeps, on each of a replica's devices.",
    )

    url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/?#\s@]+(/[^?#\s]*)?$",
        max_length=2000,
        description="With openai: address of the server, with or without /v1.",
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        max_length=2000,
        description="With openai: the model's name there; default: the only one.",
    )
    api_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_]\w*$",
        description="With openai: the environment variable that has the server's key.",
    )
    weights_dir: str | None = Field(
        default=None,
        min_length=1,
        description="With openai: a folder that the server sees under the same path; each version's weights are "
        "written there.",
    )

    @property
    def is_own(self) -> bool:
        """Whether the run's own ranks draw, with the arithmetic that trains."""
        return self.engine == BUILT_IN

    @model_validator(mode="after")
    def _only_what_is_read(self) -> Self:
        for engine, names in READ_BY.items():
            for name in names:
                if engine != self.engine and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name}: only engine={engine} reads it, not {self.engine}. Leave it out."
                    )
        for name in ("url", "weights_dir"):
            if self.engine == OPENAI and getattr(self, name) is None:
                raise ValueError(f"engine=openai needs {name}. Name it.")
        return self

    def key(self) -> str | None:
        """The server's key, from this process's environment. Raises ValueError where none is set, or one that cannot
        be sent."""
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env)):
            raise ValueError(f"generation.api_key_env: {self.api_key_env} is not set here. Set it.")
        if not HEADER_VALUE.fullmatch(key):  # not shown: it is a secret
            raise ValueError(
                f"generation.api_key_env: the key in {self.api_key_env} has a line break or another character that "
                "no header may have. Remove it where the variable is set."
            )
        return key


READ_BY: Mapping[str, tuple[str, ...]] = {
    VLLM: ("python", "kv_bytes"),
    OPENAI: ("url", "model", "api_key_env", "weights_dir"),
}
"""Engine -> the fields that it alone reads."""


def most_drawn(config: Any, context: int) -> int:
    """The most tokens of a sequence that a run draws, in training and in its evaluation.

    config   has `sampling`; context: of the model
    """
    section = getattr(config, "evaluation", None)
    answers = (section and section.max_completion_length) or 0
    return min(config.data.max_prompt_tokens + max(answers, config.sampling.max_completion_length), context)


def longest_wait_s(config: Any) -> float:
    """Seconds of the longest wait for another engine, after which it is a fault by itself; 0 for others."""
    tokens_s = SECONDS_A_TOKEN * config.sampling.max_completion_length
    return config.patience * {VLLM: START_S, OPENAI: STALL_S + tokens_s}.get(config.generation.engine, 0.0)


def _by_vllm(config: Any) -> bool:
    """vLLM, or a server that may be one."""
    return config.generation.engine in (VLLM, OPENAI)


_LEFT_OUT = (
    "{first}: training must leave out the tokens that it left out, and {second} does not say which these are. Leave "
    "it out, or choose generation.engine=builtin."
)
LEAST_TEMPERATURE = 0.01
"""vLLM raises what is lower, but 0, to this."""


def _too_cold(temperature: float | None) -> bool:
    return temperature is not None and 0 < temperature < LEAST_TEMPERATURE


_COLD = (
    "{first}: with {second} the lowest that is not 0 is "
    f"{LEAST_TEMPERATURE:g}. Raise it to that, or choose 0 where that is allowed."
)
ENGINE_PAIRS = (
    Pair(
        "sampling.temperature",
        "generation.engine",
        _COLD,
        lambda config: _by_vllm(config) and _too_cold(config.sampling.temperature),
    ),
    Pair(
        "evaluation.temperature",
        "generation.engine",
        _COLD,
        lambda config: (
            _by_vllm(config) and _too_cold(getattr(getattr(config, "evaluation", None), "temperature", None))
        ),
    ),
    Pair(
        "sampling.segment_tokens",
        "generation.engine",
        "{first}: the caches that wait between two segments are the built-in engine's, and with {second} there "
        "are none. Leave one of them out.",
        lambda config: config.sampling.segment_tokens is not None and not config.generation.is_own,
    ),
    Pair(
        "dtype",
        "generation.engine",
        "{first}: {second} computes in float32 or bfloat16. Choose one of these.",
        lambda config: config.dtype == "float64" and _by_vllm(config),
    ),
    Pair(
        "sampling.top_k",
        "generation.engine",
        _LEFT_OUT,
        lambda config: config.sampling.top_k and config.records_kept and _by_vllm(config),
    ),
    Pair(
        "sampling.top_p",
        "generation.engine",
        _LEFT_OUT,
        lambda config: config.sampling.top_p < 1 and config.records_kept and _by_vllm(config),
    ),
)
"""What engines cannot do."""


def default_python() -> str:
    """The Python of the environment that `prefect-rlhf setup vllm` makes."""
    home = os.environ.get("PREFECT_RLHF_HOME", Path.home() / ".prefect-rlhf")
    return str(Path(home, "vllm", "bin", "python"))
