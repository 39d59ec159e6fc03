"""The section that names what draws responses. Torch-free."""

import os
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from prefect_rlhf.rlhf_tasks.config.settings import Pair, Settings

BUILT_IN, VLLM, OPENAI = "builtin", "vllm", "openai"
MODULE = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"


class GenerationConfig(Settings):
    """What draws responses, in training and in evaluations (docs/adr/0028-generators.md)."""

    engine: str = Field(
        default=BUILT_IN,
        pattern=rf"^({BUILT_IN}|{VLLM}|{MODULE})$",
        description="builtin; vllm (in a process of its own, as `prefect-rlhf setup vllm` installs it); or "
        "module:Class of an engine of yours.",
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
        description="With vllm: bytes of the keys and values that it keeps, on each replica's devices.",
    )

    @property
    def is_own(self) -> bool:
        """Whether the run's own ranks draw, with the arithmetic that trains."""
        return self.engine == BUILT_IN

    @model_validator(mode="after")
    def _only_what_is_read(self) -> Self:
        if self.engine != VLLM:
            for name in ("python", "kv_bytes"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: only engine=vllm reads it, not {self.engine}. Leave it out.")
        return self


def most_drawn(config: Any, context: int) -> int:
    """The most tokens of a sequence that a run draws, in training and in its evaluation.

    config   has `sampling`; context: of the model
    """
    section = getattr(config, "evaluation", None)
    answers = (section and section.max_completion_length) or 0
    return min(config.data.max_prompt_tokens + max(answers, config.sampling.max_completion_length), context)


def _by_vllm(config: Any) -> bool:
    return config.generation.engine == VLLM


_LEFT_OUT = (
    "{first}: training must leave out the tokens that it left out, and vLLM does not say which these are. Leave it "
    "out, or choose generation.engine=builtin."
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
