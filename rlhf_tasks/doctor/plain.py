"""What plain transformers computes from a model, and how far something else is from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from rlhf_tasks.parallel.layout.weight_files import ADAPTER, WRAPPED, adapter_of, base_of

LOGITS, GRADIENTS, GREEDY = "logits.safetensors", "gradients.safetensors", "greedy.safetensors"


@dataclass(frozen=True, slots=True)
class Case:
    """What both sides compute.

    model       the model's folder
    answers     a folder for what plain transformers computes (`write_answers`)
    dtype       of weights and activations, a name in torch
    sequences   token ids; also the prompts of greedy generation
    new_tokens  tokens to generate after each
    """

    model: str
    answers: str
    dtype: str
    sequences: tuple[tuple[int, ...], ...]
    new_tokens: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def answer(self, file: str) -> Path:
        """The path of one of the files of `write_answers`."""
        return Path(self.answers) / file


class Tolerances(NamedTuple):
    """The largest differences that are in order, as from `difference`: of logits; of a parameter's gradient."""

    logits: float
    gradients: float


TOLERANCES = {"float32": Tolerances(1e-4, 1e-3), "float64": Tolerances(1e-5, 1e-4)}
"""By dtype. float64 is hardly finer, because transformers' rotary angles and norms are float32."""

ROUNDINGS = (
    3.0  # 16 bits: tolerances, in differences of transformers under 16 bits from transformers under 32
)


def difference(ours: Tensor, theirs: Tensor, of: Tensor | None = None) -> float:
    """The largest difference of two tensors, relative to the largest element of `of`, which is the second one if not
    given; infinite where one of them is not finite."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    if theirs.numel() == 0:
        return 0.0
    gap = float((ours - theirs).abs().max()) / max(float((theirs if of is None else of).abs().max()), 1e-30)
    return gap if gap < float("inf") else float("inf")  # NaN is not below


def weigh(output: Tensor, start: int = 0, columns: int = 1) -> Tensor:
    """A scalar to differentiate, in which every element of an output has its own weight.

    output          [rows], or a slice of columns [rows, n] of an output with `columns` columns that begins at `start`
    """
    row = torch.arange(output.shape[0], device=output.device)
    if output.ndim == 1:
        return (output * torch.cos(row)).sum()
    column = torch.arange(start, start + output.shape[1], device=output.device)
    return (output.float() * torch.cos((row[:, None] * columns + column).float())).sum()


def plain_logits(model: Any, sequences: Iterable[Tensor]) -> list[Tensor]:
    """The logits [length, vocabulary] of each sequence alone."""
    return [model(s[None], use_cache=False).logits[0] for s in sequences]


@torch.no_grad()
def greedy(model: Any, sequence: Tensor, new_tokens: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens after a sequence [new_tokens], and the logits that say so [new_tokens, vocabulary].

    Every step computes the whole sequence: there is no cache that could be at fault.
    """
    chosen = []
    for _ in range(new_tokens):
        [logits] = plain_logits(model, [sequence])
        chosen.append(logits[-1])
        sequence = torch.cat([sequence, logits[-1].argmax()[None]])
    return sequence[-new_tokens:], torch.stack(chosen)


def write_answers(case: Case, device: torch.device) -> Tolerances:
    """Write logits, gradients and greedy tokens of plain transformers into the case's folder for answers.

    A 16-bit case is answered in float32, and tolerates as much as rounding moves transformers itself.
    """
    wide = torch.promote_types(case.torch_dtype, torch.float32)
    model = _plain_model(case.model, wide, device)
    sequences = [torch.tensor(s, device=device) for s in case.sequences]
    logits, gradients = _logits_and_gradients(model, sequences)
    _write(case.answer(LOGITS), logits)
    save_file(gradients, case.answer(GRADIENTS))
    model.zero_grad()
    # of sequence i: tokens at 2 i, logits at 2 i + 1
    _write(case.answer(GREEDY), [part for s in sequences for part in greedy(model, s, case.new_tokens)])
    if wide == case.torch_dtype:
        return TOLERANCES[case.dtype]
    del model
    rounded, of_rounded = _logits_and_gradients(_plain_model(case.model, case.torch_dtype, device), sequences)
    return Tolerances(
        ROUNDINGS * max(map(difference, rounded, logits)),
        ROUNDINGS * max(difference(of_rounded[name], wanted) for name, wanted in gradients.items()),
    )


def _plain_model(folder: str, dtype: torch.dtype, device: torch.device) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        base_of(folder),
        dtype=dtype,
        attn_implementation="eager",  # the plain formula, which every family has
        experts_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    adapter = adapter_of(folder)
    if adapter is not None:  # peft, which would merge it, need not be installed
        halves = load_file(adapter.folder / ADAPTER)
        for name, a in halves.items():
            layer, half, _ = name.removeprefix(WRAPPED).rpartition(".lora_A.")
            if half:
                b = halves[name.replace(".lora_A.", ".lora_B.")]
                added = adapter.scale * (b.to(dtype) @ a.to(dtype))
                weight = model.get_submodule(layer).weight
                weight.data += added if isinstance(model.get_submodule(layer), nn.Linear) else added.T
    return model.to(device).eval()


def _logits_and_gradients(model: Any, sequences: Sequence[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The logits of each sequence, and the gradients of their weighted sum, as files would hold the parameters."""
    logits = plain_logits(model, sequences)
    torch.autograd.backward([weigh(each, 0, each.shape[1]) for each in logits])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: g.contiguous() for name, g in revert_weight_conversion(model, gradients).items()}
    return [each.detach() for each in logits], gradients


def _write(file: Path, tensors: Sequence[Tensor]) -> None:
    save_file({str(i): tensor.detach().contiguous() for i, tensor in enumerate(tensors)}, file)
