"""Trials of an engine: one small training on 1, 2 or 4 ranks, and by transformers and AdamW in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from prefect_rlhf.rlhf_tasks.parallel.batch import micro_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.redistribution import share_batch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from prefect_rlhf.rlhf_tasks.parallel.layout import state_layout
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head, ModelShape, Recompute
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import BUCKET
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.model.context_parallel import ContextRanks
from prefect_rlhf.rlhf_tasks.parallel.model.shares import Shares
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, Loss, LossTerms, Output
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import OptimizerSettings
from tests.tiny_models import by_our_names, held_slices, of_tensor

# 6 query and 3 KV heads, 37 tokens, 23 columns, 5 layers: nothing divides by 2 or 4.
SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 23,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, tie_word_embeddings=False, num_local_experts=3),
    "gpt2": GPT2Config(**SIZES, n_inner=23),
    "gpt_oss": GptOssConfig(**SIZES, tie_word_embeddings=False, num_local_experts=3, num_experts_per_tok=2),
}
FEW = 700
"""Elements of a bucket of sharded weights here: some end inside a layer, some reach into the next one."""
SHARDED = "parameters"
Degrees = Sequence[tuple[Any, ...]]
EVERY: Degrees = [(dp, tp, pp) for dp, tp, pp in product((1, 2, 4), repeat=3) if dp * tp * pp <= 4]


def some(*default: tuple[Any, ...], whole: Degrees = (), slow: Degrees = ()) -> list[Any]:
    """Strategies of the default suite, those that continuous integration runs too, and those of `make test-slow`.

    The first keep what is new under them: ends in several stages and heads that tp does not divide where weights are
    tied, a replica without samples (dp 4), and each kind of split together with another one.
    """
    of_suite = dict.fromkeys(slow, pytest.mark.slow) | dict.fromkeys(whole, pytest.mark.whole)
    of_suite |= dict.fromkeys(default, ())
    return [pytest.param(ParallelStrategy(*degrees), marks=marks) for degrees, marks in of_suite.items()]


LORA = Lora(3, 5.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
SETTINGS = OptimizerSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_grad_norm=0.7)
RATES = (1e-2, 3e-3, 1e-2)
TEMPERATURE = 0.8
SUMS = ("tokens", "rows")
LENGTHS = (5, 1, 9, 3, 7, 2, 4)


@dataclass(frozen=True)
class Trial:
    """What the ranks run: a model in full, and how."""

    config: PreTrainedConfig
    head: Head
    weights: dict[str, Tensor]
    strategy: ParallelStrategy
    micro_batches: int = 2
    lora: Lora | None = None
    micro_batch_tokens: int | None = None
    recompute: Recompute = "none"
    prompts: bool = False  # of several samples each; else no two samples begin alike

    @property
    def layout(self) -> Layout:
        shape = ModelShape.from_config(self.config.to_dict())
        placement = Placement(tuple(range(self.strategy.size)), self.strategy)
        return Layout(shape, self.head, placement, self.lora)


def whole_batch() -> SampleBatch:
    """Samples of different lengths, with a weight on each token but each sample's first."""
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS]
    ids = tuple(range(100, 100 + len(LENGTHS)))
    return SampleBatch(ids, {"input_ids": Packed.of(tokens), "weight": weights_of(tokens, generator)})


def weights_of(samples: list[Tensor], generator: torch.Generator) -> Packed:
    """A weight on each token but each sample's first."""
    weights = [torch.rand(len(sample), generator=generator, dtype=torch.float64) for sample in samples]
    for weight in weights:
        weight[0] = 0.0
    return Packed.of(weights)


DENOMINATOR = float(whole_batch()["weight"].values.sum())


def part_of_batch(dp_rank: int, dp: int) -> SampleBatch:
    """A replica's share: uneven, and for dp = 4 one replica has nothing."""
    batch = whole_batch()
    if dp == 4:
        bounds = (0, 1, 1, 4, 7)
        return batch.reorder(batch.ids[bounds[dp_rank] : bounds[dp_rank + 1]])
    return batch.reorder(batch.ids[dp_rank::dp])


def groups_of_batch(dp_rank: int, dp: int) -> SampleBatch:
    """A replica's groups of samples with one prompt: three of three, and one of one, of which it has every dp-th."""
    generator = torch.Generator().manual_seed(6)

    def tokens(length: int) -> Tensor:
        return torch.randint(SIZES["vocab_size"], (length,), generator=generator)

    samples = [
        torch.cat([prompt, tokens(answer)])
        for prompt, answers in ((tokens(9), (4, 1, 7)), (tokens(14), (2, 6, 3)), (tokens(8), (5,)))
        for answer in answers
    ]
    mine = [place for place, number in enumerate((0, 0, 0, 1, 1, 1, 2)) if number % dp == dp_rank]
    data = {"input_ids": Packed.of(samples), "weight": weights_of(samples, generator)}
    return SampleBatch(tuple(range(len(samples))), data).take(mine)


# On the ranks


def engine_of(trial: Trial, rank: int) -> Engine:
    layout = trial.layout
    groups = ProcessGroups(device_sets(layout.placement), 240.0, torch.device("cpu"))
    dtype = next(iter(trial.weights.values())).dtype
    shares = None
    if trial.strategy.shard == "parameters":
        with patch.object(state_layout, "BUCKET", FEW):
            shares = Shares(layout.whole, groups, dtype)
    stage = Stage(
        trial.config,
        layout,
        layout.placement.coordinate(rank),
        groups[layout.placement.tp_group(rank)],
        device=torch.device("cpu"),
        dtype=dtype,
        recompute=trial.recompute,
        context=ContextRanks.of(layout, groups),
        shares=shares,
    )
    for part in (layout.whole, layout):
        for name, mine in held_slices(part, rank, trial.weights).items():
            stage.fill(name, mine)
    with patch.object(state_layout, "BUCKET", BUCKET if shares is None else FEW):
        return Engine(stage, layout, groups, SETTINGS, micro_batch_tokens=trial.micro_batch_tokens)


def begun(trial: Trial, rank: int) -> tuple[Engine, SampleBatch]:
    """An engine with its replica's samples."""
    engine, part = engine_of(trial, rank), groups_of_batch if trial.prompts else part_of_batch
    mine = part(engine.coordinate.dp, trial.strategy.dp) if engine.is_head else None
    return engine, share_batch(mine, engine.placement, engine.groups)


def rows_of(engine: Engine) -> Output:
    """What is looked at per token: log-probabilities, or the values themselves."""
    if engine.layout.head == "scalar":
        return lambda y, micro: y
    return lambda y, micro: engine.logprobs(y, micro, TEMPERATURE)


def loss_of(engine: Engine, poison: bool = False) -> Loss:
    def loss(y: Tensor, micro: MicroBatch) -> LossTerms:
        rows = rows_of(engine)(y, micro)
        weight = micro.data["weight"].to(rows.dtype)
        total = (weight * rows.square()).sum() - (weight * rows).sum()
        total = total + float("nan") if poison else total  # its gradient stays finite
        return LossTerms(total, {"tokens": weight.sum(), "rows": (weight * rows).sum()})

    return loss


def step(engine: Engine, batch: SampleBatch, loss: Loss, micro_batches: int, rate: float):
    return engine.train_step(batch, loss, DENOMINATOR, micro_batches, rate, SUMS)


def train(rank: int, world: int, trial: Trial, sharing: bool = True):
    """Rows before training and their FLOPs, metrics of three steps, the first step's gradients, the last step's
    weights, and which frozen ones have changed. sharing: prompts of several samples are computed once."""
    engine, batch = begun(trial, rank)
    metrics, gradients = [], {}
    with pytest.MonkeyPatch.context() as patch:
        if not sharing:
            patch.setattr(micro_batch, "LEAST_SHARED", 1000)
        rows = engine.inference(batch, rows_of(engine), trial.micro_batches)
        flops = engine.flops
        for rate in RATES:
            metrics.append(step(engine, batch, loss_of(engine), trial.micro_batches, rate))
            gradients = gradients or first_gradients(engine)
    with engine.whole_weights():
        weights = {name: p.detach().clone() for name, p in engine.stage.trained_slices().items()}
        changed = [
            name
            for name, mine in held_slices(trial.layout.whole, rank, trial.weights).items()
            if name not in weights and not torch.equal(engine.stage.named_slices()[name], mine)
        ]
    of_samples = None if rows is None else dict(zip(batch.ids, rows.split(), strict=True))
    return of_samples, flops, metrics, gradients, weights, changed


def first_gradients(engine: Engine) -> dict[str, list]:
    """The clipped gradient after one step, from the first moment: its shards by name."""
    shards: dict[str, list] = {}
    for shard in engine.optimizer.shard_state():
        if shard.kind == "exp_avg":
            beta = engine.optimizer.settings.betas[0]
            shards.setdefault(shard.name, []).append((shard.start, shard.stop, shard.tensor / (1 - beta)))
    return shards


# Plain transformers


class Merged(nn.Module):
    """A linear module with the weight W + alpha / rank * B A, of which A and B train (arXiv:2106.09685)."""

    def __init__(self, linear: nn.Linear, lora: Lora, dtype: torch.dtype) -> None:
        super().__init__()
        out, into = linear.weight.shape
        self.weight, self.bias, self.factor = linear.weight, linear.bias, lora.alpha / lora.rank
        self.lora_A = nn.Linear(into, lora.rank, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(lora.rank, out, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.factor * (self.lora_B.weight @ self.lora_A.weight), self.bias)


class Routing(nn.Module):
    """Mixtral's router in its weight's dtype."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        best, chosen = logits.topk(self.top_k)
        return logits, best.softmax(-1), chosen


class Plain(nn.Module):
    """The same model in one process: transformers' own forward, one sample at a time, nothing packed.

    In float64 its norms are torch's, and its routers are written out: transformers' own compute in float32, whatever
    the model's dtype.
    """

    def __init__(
        self, config: PreTrainedConfig, head: Head, dtype: torch.dtype, lora: Lora | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        whole = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype).eval()
        self.model, self.head, self._whole = whole.base_model, head, (whole,)
        self.lm_head = whole.lm_head if head == "lm" else None
        self.score = nn.Linear(config.hidden_size, 1, bias=False, dtype=dtype) if head == "scalar" else None
        if dtype == torch.float64:
            for name, module in list(self.model.named_modules()):
                if type(module).__name__.endswith("RMSNorm"):
                    norm = nn.RMSNorm(module.weight.shape[0], module.variance_epsilon, dtype=dtype)
                    self.model.set_submodule(name, norm)
                if type(module).__name__ == "MixtralTopKRouter":
                    self.model.set_submodule(name, Routing(module))
        for parameter in self.parameters():
            if parameter.ndim == 1:  # norms start at one everywhere, which would hide mixed-up slices
                nn.init.uniform_(parameter, 0.5, 1.5)
        if lora is not None:
            self._adapt(lora, dtype)

    def _adapt(self, lora: Lora, dtype: torch.dtype) -> None:
        """Freeze all but a value head, and put adapters into the layers' linear modules."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name == "score.weight")
        for name, module in list(self.model.layers.named_modules()):
            if name.split(".")[-1] in lora.targets:
                self.model.layers.set_submodule(name, Merged(module, lora, dtype))

    def rows(self, tokens: Tensor) -> Tensor:
        """[L]: log-probabilities in the packed convention, or values."""
        hidden = self.model(tokens[None]).last_hidden_state[0]
        if self.score is not None:
            return self.score(hidden).squeeze(-1)
        log_p = (self.lm_head(hidden[:-1]) / TEMPERATURE).log_softmax(-1)
        return torch.cat([hidden.new_zeros(1), log_p.gather(1, tokens[1:, None]).squeeze(1)])

    def named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors of parameters, by our names; tied weights once."""
        config = self._whole[0].config
        if config.model_type in ("mixtral", "gpt2", "gpt_oss"):
            layout = Trial(config, self.head, {}, ParallelStrategy()).layout
            prefix = self._whole[0].base_model_prefix
            theirs = {name.replace("model.", f"{prefix}.", 1): tensor for name, tensor in tensors.items()}
            tensors = by_our_names(layout, self._whole[0], theirs)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Expected:
    start: dict[str, Tensor]
    rows: list[Tensor]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


ON_ONE_RANK: dict[tuple, Any] = {}


@cache
def expected_of(model: str, head: Head, dtype: torch.dtype, lora: Lora | None) -> Expected:
    """Three steps of plain training."""
    return train_plain(Plain(CONFIGS[model], head, dtype, lora))


def on_one_rank(ranks, function: Callable, trial: Trial, *rest: Any) -> Any:
    """What a function of ranks gives on one rank. Computed once per function, head and adapters."""
    key = (function.__name__, trial.head, trial.lora, rest)
    if key not in ON_ONE_RANK:
        (ON_ONE_RANK[key],) = ranks.run(1, function, trial, *rest)
    return ON_ONE_RANK[key]


def train_plain(plain: Plain) -> Expected:
    start, batch = plain.named(dict(plain.named_parameters())), whole_batch()
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    matrices = {name for name, p in trained.items() if p.ndim > 1 and not name.endswith("bias")}
    decayed = [trained[name] for name in trained if name in matrices]
    others = [trained[name] for name in trained if name not in matrices]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        betas=SETTINGS.betas,
        eps=SETTINGS.eps,
        weight_decay=SETTINGS.weight_decay,
    )
    losses, norms, gradients, first_rows = [], [], {}, []
    for rate in RATES:
        rows = [plain.rows(tokens) for tokens in batch["input_ids"].split()]
        weights = [weight.to(rows[0].dtype) for weight in batch["weight"].split()]
        total = sum(((w * r.square()).sum() - (w * r).sum()) for w, r in zip(weights, rows, strict=True))
        optimizer.zero_grad()
        (total / DENOMINATOR).backward()
        norms.append(nn.utils.clip_grad_norm_(trained.values(), SETTINGS.max_grad_norm).item())
        losses.append(total.item() / DENOMINATOR)
        if not gradients:
            gradients = plain.named({name: p.grad for name, p in trained.items()})
            first_rows = [r.detach() for r in rows]
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return Expected(start, first_rows, losses, norms, gradients, plain.named(dict(plain.named_parameters())))


# Comparisons


def assert_equal(results: list, trial: Trial, expected: Expected, rows: float, relative: float) -> None:
    """rows: absolute bound of log-probabilities or values; relative: of all else, to a tensor's largest."""
    layout = trial.layout
    seen: dict[int, Tensor] = {}
    for rank, (got_rows, _, metrics, gradients, weights, changed) in enumerate(results):
        assert not changed, "weights below adapters"
        at = layout.placement.coordinate(rank)
        assert (got_rows is not None) == (at.pp == trial.strategy.pp - 1)
        if got_rows is not None:
            seen |= got_rows
        assert metrics == results[0][2]
        assert [m["loss"] for m in metrics] == pytest.approx(expected.losses, rel=relative)
        assert [m["grad_norm"] for m in metrics] == pytest.approx(expected.norms, rel=relative)
        assert [m["skipped"] for m in metrics] == [0.0] * len(RATES)
        assert [list(m) for m in metrics] == [[*SUMS, "loss", "grad_norm", "skipped"]] * len(RATES)
        assert metrics[0]["tokens"] == pytest.approx(DENOMINATOR, rel=relative)
        theirs = held_slices(layout, rank, expected.gradients)
        for name, shards in gradients.items():
            bound = of_tensor(layout, expected.gradients, name).abs().max().item() * relative
            for start, stop, shard in shards:
                assert_close(shard, theirs[name].flatten()[start:stop], rtol=0, atol=bound)
        for name, weight in held_slices(layout, rank, expected.weights).items():
            assert_close(weights[name], weight, rtol=0, atol=weight.abs().max().item() * relative)
    for sample, want in zip(whole_batch().ids, expected.rows, strict=True):
        assert_close(seen[sample], want, rtol=0, atol=rows)


def trial_of(model: str, head: Head, strategy: ParallelStrategy, dtype=torch.float64, **how: Any) -> Trial:
    """From the weights that `expected_of` begins with."""
    start = expected_of(model, head, dtype, how.get("lora")).start
    return Trial(CONFIGS[model], head, start, strategy, **how)


def way(what: str, model: str, strategies: list[Any], head: Head = "lm", **how: Any) -> list[Any]:
    """Cases of one model, head and further fields of a trial, or its dtype."""
    return [
        pytest.param(model, head, *s.values, how, marks=s.marks, id=f"{what}-{s.values[0]}")
        for s in strategies
    ]
