"""The doctor: a model's folder on rank processes of its own, split in several ways, against plain transformers.

First what plain transformers computes and how far apart two results may be, then the engines under each strategy.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.quantization_config import Mxfp4Config

from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch, split
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import (
    ProcessGroups,
    all_reduce,
    device_sets,
    join_world,
    leave_world,
)
from prefect_rlhf.rlhf_tasks.parallel.comm.reallocation import reallocate, union_set
from prefect_rlhf.rlhf_tasks.parallel.generate.generation import generate
from prefect_rlhf.rlhf_tasks.parallel.generate.sampling import SamplingParams
from prefect_rlhf.rlhf_tasks.parallel.layout.below_images import own_name
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ParameterSpec
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import (
    ADAPTER,
    WRAPPED,
    adapter_of,
    base_of,
    read_shape,
)
from prefect_rlhf.rlhf_tasks.parallel.model.context_parallel import ContextRanks
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import load, load_config, stored_rows
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine
from prefect_rlhf.rlhf_tasks.system.child_processes import die_with_parent
from prefect_rlhf.rlhf_tasks.system.rank_process import OutOfMemory, told_when_out
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, read_json

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
    as_floats: dict[str, Any] = {}
    if read_json(base_of(folder) / "config.json").get("quantization_config"):  # MXFP4: others are refused
        as_floats = {"quantization_config": Mxfp4Config(dequantize=True)}
    described = AutoConfig.from_pretrained(base_of(folder), local_files_only=True, trust_remote_code=False)
    alone = type(described) in MODEL_FOR_CAUSAL_LM_MAPPING
    model: Any = (AutoModelForCausalLM if alone else AutoModelForImageTextToText).from_pretrained(
        base_of(folder),
        dtype=dtype,
        attn_implementation="eager",  # the plain formula, which every family has
        experts_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        **as_floats,
    )
    if as_floats:
        model._weight_conversions = []  # which would give a gradient the name of the blocks
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
    buffers = dict(model.named_buffers())  # those that files have too are constants
    gradients |= {name: torch.zeros_like(buffers[name]) for name in model.state_dict() if name in buffers}
    in_files: dict[str, Tensor] = revert_weight_conversion(model, gradients)
    # Of a model of images or sound, the language model's by their own names.
    gradients = {own_name(name) or name: gradient.contiguous() for name, gradient in in_files.items()}
    return [each.detach() for each in logits], gradients


def _write(file: Path, tensors: Sequence[Tensor]) -> None:
    save_file({str(i): tensor.detach().contiguous() for i, tensor in enumerate(tensors)}, file)


MICRO_BATCHES = 2
GROUP_TIMEOUT_S = 1800.0
GRACE_S = 5.0  # for the peers of a rank that failed to say what they saw
ENDS_S = 10.0  # for a rank that has answered to end


class Finding(NamedTuple):
    """One comparison under one strategy: the largest difference of all ranks, and the largest that is in order."""

    strategy: ParallelStrategy
    check: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance


def placement_of(strategy: ParallelStrategy) -> Placement:
    """The first devices, as many as a strategy needs."""
    return Placement(tuple(range(strategy.size)), strategy)


def examine(
    rank: int,
    device: torch.device,
    case: Case,
    tolerances: Tolerances,
    strategies: Sequence[ParallelStrategy],
) -> list[Finding]:
    """This rank's findings under each strategy that it has a part in. All ranks of the world call it together.

    case  the answers of plain transformers are there
    """
    placements = [placement_of(strategy) for strategy in strategies]
    sets = [devices for placement in placements for devices in device_sets(placement)]
    sets += [union_set(placement, _one_rank(placement)) for placement in placements]
    groups = ProcessGroups(sets, GROUP_TIMEOUT_S, device)
    return [
        finding
        for placement in placements
        if rank in placement.devices
        for finding in _Examination(groups, case, placement).findings(tolerances)
    ]


def worst(of_ranks: Iterable[Sequence[Finding]]) -> list[Finding]:
    """The findings of all ranks in one list, each with its largest difference."""
    found: dict[tuple[ParallelStrategy, str], Finding] = {}
    for finding in (each for rank in of_ranks for each in rank):
        key = (finding.strategy, finding.check)
        if key not in found or finding.difference > found[key].difference:
            found[key] = finding
    return list(found.values())


def _one_rank(placement: Placement) -> Placement:
    return Placement((placement.devices[-1],), ParallelStrategy())


class _Examination:
    """One rank under one placement. Each replica has every dp-th sequence."""

    def __init__(self, groups: ProcessGroups, case: Case, placement: Placement) -> None:
        self.groups, self.case, self.placement = groups, case, placement
        self.layout = Layout(read_shape(case.model), "lm", placement)
        self.at = placement.coordinate(groups.rank)
        self.stage = Stage(
            load_config(case.model),
            self.layout,
            self.at,
            groups[placement.tp_group(groups.rank)],
            device=groups.device,
            dtype=case.torch_dtype,
            context=ContextRanks.of(self.layout, groups),
        )
        load(self.stage, case.model, seed=0)
        self.engine = Engine(self.stage, self.layout, groups)
        self.ids = tuple(range(self.at.dp, len(case.sequences), placement.strategy.dp))
        self.vocab = self.layout.units("vocab", self.at.tp)

    def findings(self, tolerances: Tolerances) -> Iterator[Finding]:
        """The checks, in an order that is the same on every rank. Ranks that divide tokens do not generate."""
        checks = [
            ("logits", self._logits, tolerances.logits),
            ("gradients", self._gradients, tolerances.gradients),
            ("greedy tokens", self._greedy, tolerances.logits),
            ("reallocation", self._reallocation, 0.0),
        ]
        for check, gap, tolerance in checks:
            if self.stage.context is None or check != "greedy tokens":
                yield Finding(self.placement.strategy, check, gap(), tolerance)

    def _output(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """The stage's output; of the last one the logits of all tokens, also where other ranks compute some."""
        context = self.stage.context
        if context is None or not self.stage.is_last:
            return self.stage(x, micro)
        micro = replace(micro, rows=torch.arange(micro.tokens, device=self.groups.device))
        return context.gather_rows(self.stage(x, micro, rows=micro.rows), micro)

    def _batch(self, key: str) -> SampleBatch:
        sequences = [torch.tensor(self.case.sequences[i], device=self.groups.device) for i in self.ids]
        return SampleBatch(self.ids, {key: Packed.of(sequences)})

    def _logits(self) -> float:
        """The gap of this rank's slices of the logits."""
        context = self.stage.context

        def output(logits: Tensor, micro: MicroBatch) -> Tensor:
            if context is None:
                return logits
            assert micro.rows is not None
            whole = logits.new_zeros(micro.tokens, logits.shape[1])
            return whole.index_copy(0, micro.rows, context.gather_rows(logits, micro))

        rows = self.engine.inference(self._batch("input_ids"), output, MICRO_BATCHES)
        if rows is None:
            return 0.0
        theirs, columns = load_file(self.case.answer(LOGITS)), slice(*self.vocab)
        seen = slice(None) if context is None else slice(-1)  # the last token predicts nothing
        return max(
            difference(ours[seen].cpu(), theirs[str(i)][seen, columns])
            for i, ours in zip(self.ids, rows.split(), strict=True)
            if len(ours[seen])
        )

    def _gradients(self) -> float:
        """The gap of this rank's slices of the gradients, summed over replicas and copies as training sums them."""
        self.stage.requires_grad_(True)

        def run(x: Tensor, micro: MicroBatch) -> Tensor:
            output = self._output(x, micro)
            if not self.stage.is_last:
                return output
            parts = [weigh(of, self.vocab.start, self.layout.shape.vocab) for of in micro.per_sample(output)]
            return torch.stack(parts).sum()

        self.engine.pipeline.forward_backward(split(self._batch("input_ids"), MICRO_BATCHES), run)
        gap = 0.0
        with safe_open(self.case.answer(GRADIENTS), framework="pt") as theirs:
            for name, whole_sum in self._summed():
                spec, rows = self.layout.specs[name], self.layout.held(self.groups.rank)[name]
                wanted = stored_rows(theirs.get_slice, spec, rows)
                # Where there are no rotary angles, the gradient of key biases is zero but for rounding.
                packed = None if spec.packed is None else theirs.get_tensor(spec.packed.name)
                gap = max(gap, difference(whole_sum.cpu(), wanted, packed))
        self.stage.requires_grad_(False)
        self.stage.zero_grad()
        return gap

    def _summed(self) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient of this rank's slice), one parameter at a time. Collective over the placement."""
        slices = self.stage.named_slices()
        wide = torch.promote_types(self.case.torch_dtype, torch.float32)
        for spec in self.layout.parameters:
            gradient = None
            if spec.name in slices:
                mine = slices[spec.name]
                gradient = (torch.zeros_like(mine) if mine.grad is None else mine.grad).to(wide)
            if spec.partial_gradient:
                gradient = self._sum_of_copies(spec, gradient)
            if gradient is not None:
                dp_group = self.groups[self.placement.dp_group(self.groups.rank)]
                yield spec.name, all_reduce(gradient.contiguous(), dp_group)

    def _sum_of_copies(self, spec: ParameterSpec, mine: Tensor | None) -> Tensor | None:
        """This rank's slice of a gradient of which each copy in the replica has a part. Collective over the replica.

        mine  its own part; None where it holds none of the parameter
        """
        rows = self.layout.held(self.groups.rank).get(spec.name)
        total = torch.zeros(spec.shape, dtype=torch.float64, device=self.groups.device)
        if mine is not None and rows is not None:
            total.narrow(spec.dim, rows.start, rows.size).add_(mine)
        all_reduce(total, self.groups[self.placement.replica(self.at.dp)])
        total /= self.placement.strategy.cp  # whose ranks each add it to those of the others
        if mine is None or rows is None:
            return None
        return total.narrow(spec.dim, rows.start, rows.size).to(mine.dtype)

    def _greedy(self) -> float:
        """How much less likely than the likeliest token ours is, where the two first differ; 0 where none differs.

        In logits, relative to the largest one: within rounding error of each other, either may be taken.
        """
        params = SamplingParams(max_new_tokens=self.case.new_tokens, temperature=0.0)
        answered = generate(self.engine, self._batch("prompt_ids"), params, seed=0, iteration=0)
        if answered is None:
            return 0.0
        theirs, gap = load_file(self.case.answer(GREEDY)), 0.0
        for i, ours in zip(self.ids, answered["input_ids"].split(), strict=True):
            ours, likeliest, logits = (
                ours[-self.case.new_tokens :].cpu(),
                theirs[f"{2 * i}"],
                theirs[f"{2 * i + 1}"],
            )
            apart = (ours != likeliest).nonzero()
            if len(apart):
                at = int(apart[0])
                short = logits[at, likeliest[at]] - logits[at, ours[at]]
                gap = max(gap, float(short) / float(logits[at].abs().max()))
        return gap

    def _reallocation(self) -> float:
        """The gap of the weights after they were moved to one rank and back."""
        there = Layout(self.layout.shape, "lm", _one_rank(self.placement))
        mine = {name: slice_.detach() for name, slice_ in self.stage.named_slices().items()}
        rest = (self.case.torch_dtype, self.groups, self.placement.strategy.size)
        moved = reallocate(self.layout, there, mine, *rest).slices
        back = reallocate(there, self.layout, moved, *rest).slices
        assert back is not None
        return max(difference(back[name], slice_) for name, slice_ in mine.items())


def run_ranks(n: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
    """Call `function(rank, device, *args)` on n new rank processes in one world. Returns their results in rank order.

    function, args  travel by pickle, and so do the results
    The ranks compute on this machine's GPUs if there is one for each, else on the CPU, with one thread each.
    Raises ConfigError where memory ran out, RuntimeError with the first rank's error, TimeoutError after `timeout_s`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn, pipes, processes = multiprocessing.get_context("spawn"), list[Connection](), []
    try:
        for rank in range(n):
            ours, theirs = spawn.Pipe(duplex=False)
            work = (rank, n, store.port, os.getpid(), timeout_s, theirs, function, args)
            process = spawn.Process(target=_rank, args=work, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results = _collected(pipes, timeout_s)
        for process in processes:
            process.join(ENDS_S)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collected(pipes: list[Connection], timeout_s: float) -> list[Any]:
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    results: list[Any] = [None] * len(pipes)
    deadline, failed = time.monotonic() + timeout_s, list[tuple[int, type[Exception], str]]()
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                fault, results[rank] = pipe.recv()
            except EOFError:
                fault = ConfigError
                results[rank] = (
                    f"rank {rank} was ended, as the kernel does when memory runs out. Use fewer ranks."
                )
            if fault is not None:
                failed.append((rank, fault, results[rank]))
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failed:
        rank, fault, said = min(failed, key=lambda each: (each[1] is not ConfigError, each[0]))
        raise fault(said)
    if waiting:
        raise TimeoutError(f"ranks {sorted(waiting.values())} gave no result in {timeout_s:g} s")
    return results


def _rank(
    rank: int,
    n: int,
    port: int,
    parent: int,
    timeout_s: float,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """A rank's life: (error class or None, result or what the error says) through the pipe."""
    die_with_parent(parent)
    on_gpus = torch.cuda.device_count() >= n
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if not on_gpus:
        torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        join_world(store, rank, n, timeout_s, device)
        with told_when_out(f"rank {rank}", device):
            answer = None, function(rank, device, *args)
    except OutOfMemory as error:
        answer = ConfigError, str(error)
    except Exception:  # noqa: BLE001  whatever it is, the parent raises it again
        answer = RuntimeError, f"rank {rank} of {n}: {traceback.format_exc()}"
    pipe.send(answer)
    leave_world()
