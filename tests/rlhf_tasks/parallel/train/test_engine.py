"""Engines of 1, 2 and 4 ranks against plain transformers and torch's AdamW in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from prefect_rlhf.rlhf_tasks.parallel.layout.shares import gathering
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.state_layout import BUCKET
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.layout.work import head_flops, pass_flops
from prefect_rlhf.rlhf_tasks.parallel.model.context_parallel import ContextRanks
from prefect_rlhf.rlhf_tasks.parallel.model.shares import Shares
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, Loss, LossTerms, Output
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import OptimizerSettings
from tests.tiny_models import by_our_names, held_slices, of_tensor, tiny_config, tiny_model

pytestmark = pytest.mark.dist

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


def _batch() -> SampleBatch:
    """Samples of different lengths, with a weight on each token but each sample's first."""
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS]
    ids = tuple(range(100, 100 + len(LENGTHS)))
    return SampleBatch(ids, {"input_ids": Packed.of(tokens), "weight": _weights_of(tokens, generator)})


def _weights_of(samples: list[Tensor], generator: torch.Generator) -> Packed:
    """A weight on each token but each sample's first."""
    weights = [torch.rand(len(sample), generator=generator, dtype=torch.float64) for sample in samples]
    for weight in weights:
        weight[0] = 0.0
    return Packed.of(weights)


DENOMINATOR = float(_batch()["weight"].values.sum())


def _part(dp_rank: int, dp: int) -> SampleBatch:
    """A replica's share: uneven, and for dp = 4 one replica has nothing."""
    batch = _batch()
    if dp == 4:
        bounds = (0, 1, 1, 4, 7)
        return batch.select(batch.ids[bounds[dp_rank] : bounds[dp_rank + 1]])
    return batch.select(batch.ids[dp_rank::dp])


def _groups(dp_rank: int, dp: int) -> SampleBatch:
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
    data = {"input_ids": Packed.of(samples), "weight": _weights_of(samples, generator)}
    return SampleBatch(tuple(range(len(samples))), data).take(mine)


# On the ranks


def _engine(trial: Trial, rank: int) -> Engine:
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


def _begun(trial: Trial, rank: int) -> tuple[Engine, SampleBatch]:
    """An engine with its replica's samples."""
    engine, part = _engine(trial, rank), _groups if trial.prompts else _part
    mine = part(engine.coordinate.dp, trial.strategy.dp) if engine.is_head else None
    return engine, share_batch(mine, engine.placement, engine.groups)


def _rows(engine: Engine) -> Output:
    """What is looked at per token: log-probabilities, or the values themselves."""
    if engine.layout.head == "scalar":
        return lambda y, micro: y
    return lambda y, micro: engine.logprobs(y, micro, TEMPERATURE)


def _loss(engine: Engine, poison: bool = False) -> Loss:
    def loss(y: Tensor, micro: MicroBatch) -> LossTerms:
        rows = _rows(engine)(y, micro)
        weight = micro.data["weight"].to(rows.dtype)
        total = (weight * rows.square()).sum() - (weight * rows).sum()
        total = total + float("nan") if poison else total  # its gradient stays finite
        return LossTerms(total, {"tokens": weight.sum(), "rows": (weight * rows).sum()})

    return loss


def _step(engine: Engine, batch: SampleBatch, loss: Loss, micro_batches: int, rate: float):
    return engine.train_step(batch, loss, DENOMINATOR, micro_batches, rate, SUMS)


def _train(rank: int, world: int, trial: Trial, sharing: bool = True):
    """Rows before training and their FLOPs, metrics of three steps, the first step's gradients, the last step's
    weights, and which frozen ones have changed. sharing: prompts of several samples are computed once."""
    engine, batch = _begun(trial, rank)
    metrics, gradients = [], {}
    with pytest.MonkeyPatch.context() as patch:
        if not sharing:
            patch.setattr(micro_batch, "LEAST_SHARED", 1000)
        rows = engine.inference(batch, _rows(engine), trial.micro_batches)
        flops = engine.flops
        for rate in RATES:
            metrics.append(_step(engine, batch, _loss(engine), trial.micro_batches, rate))
            gradients = gradients or _first_gradients(engine)
    with engine.whole_weights():
        weights = {name: p.detach().clone() for name, p in engine.stage.trained_slices().items()}
        changed = [
            name
            for name, mine in held_slices(trial.layout.whole, rank, trial.weights).items()
            if name not in weights and not torch.equal(engine.stage.named_slices()[name], mine)
        ]
    of_samples = None if rows is None else dict(zip(batch.ids, rows.split(), strict=True))
    return of_samples, flops, metrics, gradients, weights, changed


def _first_gradients(engine: Engine) -> dict[str, list]:
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


_ON_ONE_RANK: dict[tuple, Any] = {}


@cache
def _expected(model: str, head: Head, dtype: torch.dtype, lora: Lora | None) -> Expected:
    """Three steps of plain training."""
    return _train_plain(Plain(CONFIGS[model], head, dtype, lora))


def _on_one_rank(ranks, function: Callable, trial: Trial, *rest: Any) -> Any:
    """What a function of ranks gives on one rank. Computed once per function, head and adapters."""
    key = (function.__name__, trial.head, trial.lora, rest)
    if key not in _ON_ONE_RANK:
        (_ON_ONE_RANK[key],) = ranks.run(1, function, trial, *rest)
    return _ON_ONE_RANK[key]


def _train_plain(plain: Plain) -> Expected:
    start, batch = plain.named(dict(plain.named_parameters())), _batch()
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


def _assert_equal(results: list, trial: Trial, expected: Expected, rows: float, relative: float) -> None:
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
    for sample, want in zip(_batch().ids, expected.rows, strict=True):
        assert_close(seen[sample], want, rtol=0, atol=rows)


def _trial(model: str, head: Head, strategy: ParallelStrategy, dtype=torch.float64, **how: Any) -> Trial:
    """From the weights that `_expected` begins with."""
    start = _expected(model, head, dtype, how.get("lora")).start
    return Trial(CONFIGS[model], head, start, strategy, **how)


def way(what: str, model: str, strategies: list[Any], head: Head = "lm", **how: Any) -> list[Any]:
    """Cases of one model, head and further fields of a trial, or its dtype."""
    return [
        pytest.param(model, head, *s.values, how, marks=s.marks, id=f"{what}-{s.values[0]}")
        for s in strategies
    ]


ALMOST_EVERY = some((1, 2, 2), whole=[(1, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1)], slow=EVERY)
TIED = some((1, 2, 2), whole=[(1, 1, 2), (1, 4, 1), (2, 2, 1)], slow=EVERY)
VALUES = some((2, 1, 2), whole=[(1, 1, 1), (4, 1, 1), (1, 2, 2)], slow=EVERY)
ROUNDED = some((2, 2, 1), whole=[(1, 1, 1), (1, 2, 2)], slow=EVERY)
SPLIT_AND_WHOLE = some((1, 2, 2), whole=[(1, 1, 1)])


@pytest.mark.parametrize(
    ("model", "head", "strategy", "how"),
    [
        *way("plain", "llama", some((1, 1, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2), whole=EVERY)),
        *way("tied weights and norms of heads", "qwen3-tied", TIED),
        *way("tied weights", "llama-tied", SPLIT_AND_WHOLE),
        *way("norms of heads", "qwen3", SPLIT_AND_WHOLE),
        *way("values", "qwen3-tied", VALUES, "scalar"),
        *way("float32", "llama-tied", ROUNDED, dtype=torch.float32),
        *way("experts", "mixtral", ALMOST_EVERY),
        *way("experts with biases, and sinks", "gpt_oss", some((1, 2, 2), whole=[(1, 1, 1), (2, 2, 1)])),
        *way("packed and transposed projections", "gpt2", some((1, 2, 2), whole=EVERY)),
        *way(
            "context",
            "llama",
            some((1, 1, 1, 4), (1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 1, 2), whole=[(1, 1, 1, 2)]),
        ),
        *way("context of tied weights", "qwen3-tied", some((1, 1, 2, 2), (1, 1, 1, 4))),
        *way(
            "context of values",
            "qwen3-tied",
            some((1, 1, 1, 4), whole=[(1, 2, 1, 2), (1, 1, 2, 2)]),
            "scalar",
        ),
        *way("context of experts", "mixtral", some((1, 1, 1, 2), whole=[(1, 2, 1, 2)])),
        *way("context of sinks", "gpt_oss", some((1, 1, 1, 4), whole=[(1, 2, 1, 2)])),
        *way("context in float32", "llama-tied", some((1, 1, 1, 2)), dtype=torch.float32),
        *way("context of packed projections", "gpt2", some((1, 1, 1, 2))),
        *(
            case
            for recompute in ("none", "selective", "full")
            for case in way(
                f"context of adapters, recomputation {recompute}",
                "qwen3-tied",
                some((1, 2, 1, 2)),
                recompute=recompute,
                lora=LORA,
            )
        ),
        *way("micro-batches: 1", "llama", some((2, 1, 2), slow=[(1, 1, 1)]), micro_batches=1),
        *way("micro-batches: 3", "llama", some((2, 1, 2), (1, 1, 1)), micro_batches=3),
        *way("micro-batches: 7", "llama", some((2, 1, 2), slow=[(1, 1, 1)]), micro_batches=7),
        *way(
            "replicas with different numbers of micro-batches",
            "llama",
            some((2, 1, 2), whole=[(1, 1, 1), (2, 1, 1), (4, 1, 1)]),
            micro_batches=1,
            micro_batch_tokens=9,
        ),
        *way("adapters", "qwen3-tied", ALMOST_EVERY, lora=LORA),
        *(
            case
            for targets in [("k_proj", "down_proj"), ("o_proj",)]
            for case in way(
                f"values and adapters of {' and '.join(targets)}",
                "llama",
                SPLIT_AND_WHOLE,
                "scalar",
                lora=replace(LORA, targets=targets),
            )
        ),
        *way(
            "sharded",
            "llama",
            some((4, 1, 1, 1, SHARDED), whole=[(2, 1, 1, 1, SHARDED), (2, 2, 1, 1, SHARDED)]),
        ),
        *way("sharded", "qwen3-tied", some((2, 2, 1, 1, SHARDED), whole=[(4, 1, 1, 1, SHARDED)])),
        *way("sharded values", "qwen3-tied", some((2, 1, 1, 1, SHARDED)), "scalar", micro_batches=3),
        *way("sharded experts", "mixtral", some((4, 1, 1, 1, SHARDED), whole=[(2, 2, 1, 1, SHARDED)])),
        *way("sharded context", "qwen3-tied", some((1, 1, 1, 2, SHARDED), (2, 1, 1, 2, SHARDED))),
        *way("sharded, packed", "gpt2", some((2, 1, 1, 1, SHARDED))),
        *way(
            "sharded, with different numbers of micro-batches",
            "llama-tied",
            some((2, 1, 1, 1, SHARDED)),
            micro_batches=1,
            micro_batch_tokens=9,
        ),
        *(
            case
            for recompute in ("none", "selective", "full")
            for lora in (None, LORA)
            if recompute != "none" or lora
            for case in way(
                f"sharded, {recompute} recomputation{' with adapters' if lora else ''}",
                "qwen3-tied",
                some((2, 1, 1, 1, SHARDED), whole=[(4, 1, 1, 1, SHARDED)]),
                recompute=recompute,
                lora=lora,
            )
        ),
        *(
            case
            for recompute, lora in [("selective", None), ("selective", LORA), ("full", LORA)]
            for case in way(
                f"{recompute} recomputation{' with adapters' if lora else ''}",
                "qwen3-tied",
                some((1, 2, 2), slow=[(1, 2, 1), (2, 1, 1)]),
                recompute=recompute,
                lora=lora,
            )
        ),
    ],
)
def test_training_equals_plain_transformers(ranks, model: str, head: Head, strategy, how: dict) -> None:
    """To rounding: in float64, but for one."""
    dtype = how.get("dtype", torch.float64)
    trial = _trial(model, head, strategy, **how)
    expected = _expected(model, head, dtype, trial.lora)
    bounds = (1e-5, 1e-5) if dtype == torch.float32 else (1e-10, 1e-9)
    _assert_equal(ranks.run(strategy.size, _train, trial), trial, expected, *bounds)


ON_Q_AND_V = Lora(3, 5.0, ("q_proj", "v_proj"))
"""Of families whose first layers do not attend: there is nothing to train before layer 1."""


def _of_family(family: str, lora: Lora | None) -> Trial:
    """A tiny model with the weights of transformers' own, and random adapters, on one rank."""
    config, generator = tiny_config(family), torch.Generator().manual_seed(3)
    trial = Trial(config, "lm", {}, ParallelStrategy(), lora=lora)
    model = tiny_model(config).double()
    weights = by_our_names(trial.layout.whole, model, model.state_dict())
    for spec in trial.layout.parameters if lora else ():
        weights[spec.name] = 0.1 * torch.randn(spec.shape, generator=generator, dtype=torch.float64)
    return replace(trial, weights=weights)


@pytest.mark.parametrize(
    ("family", "lora", "degrees"),
    [
        ("gemma4_text", None, (2, 1, 1, 1)),
        ("gemma4_text", None, (1, 1, 1, 2)),
        ("gemma4_text", ON_Q_AND_V, (2, 1, 1, 1)),
        ("qwen3_next", ON_Q_AND_V, (4, 1, 1, 1)),
        ("lfm2", ON_Q_AND_V, (2, 1, 1, 1)),
        ("deepseek_v3", None, (2, 1, 1, 1)),
        ("gemma3_text", None, (1, 2, 1, 2)),
    ],
)
def test_sharded_weights_of_any_family_train_as_whole_ones(ranks, family, lora, degrees) -> None:
    """On one rank. Of four replicas one has no samples: it gathers what the backward passes of the others gather."""
    plain = _of_family(family, lora)
    ((rows, _, metrics, _, weights, _),) = ranks.run(1, _train, plain)
    trial = replace(plain, strategy=ParallelStrategy(*degrees, SHARDED))
    for rank, (of_rank, _, steps, _, after, changed) in enumerate(
        ranks.run(trial.strategy.size, _train, trial)
    ):
        assert not changed, "weights below adapters"
        assert steps == [pytest.approx(step, rel=1e-9) for step in metrics]
        for sample, values in (of_rank or {}).items():
            assert_close(values, rows[sample], rtol=1e-9, atol=1e-10)
        for name, weight in held_slices(trial.layout, rank, weights).items():
            assert_close(after[name], weight, rtol=0, atol=1e-9 * weight.abs().max().item())


def _work(rank: int, world: int, trial: Trial):
    """FLOPs of a forward pass, then of a step too, then of a forward pass in which all tokens count."""
    engine, batch = _begun(trial, rank)
    everywhere = Packed(torch.ones(len(batch["weight"].values), dtype=torch.bool), batch["weight"].lengths)
    batch = SampleBatch(batch.ids, {**batch.data, "counted": everywhere})
    engine.inference(batch, _rows(engine), trial.micro_batches)
    _step(engine, batch, _loss(engine), trial.micro_batches, 1e-2)
    flops = engine.flops
    engine.inference(batch, _rows(engine), trial.micro_batches, counted="counted")
    return flops, engine.flops - flops


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
@pytest.mark.parametrize("strategy", some((1, 1, 1), (2, 1, 2), (4, 1, 1)), ids=str)
def test_the_work_of_all_ranks_is_the_models_however_it_is_split(ranks, strategy, lora) -> None:
    """With adapters, without the gradients of frozen weights. A sample's first token, which nothing predicts, is no
    work of the head where it is told which tokens count."""
    trial = _trial("llama", "lm", strategy, lora=lora)
    shape = trial.layout.shape
    work, counted = zip(*ranks.run(strategy.size, _work, trial), strict=True)
    expected = sum(pass_flops(shape, "lm", LENGTHS, None, lora, (), training) for training in (False, True))
    assert sum(work) == pytest.approx(expected, rel=1e-12)
    predicted = sum(LENGTHS) - len(LENGTHS)
    assert sum(counted) == pytest.approx(pass_flops(shape, "lm", LENGTHS, predicted, lora), rel=1e-12)


def _counted(rank: int, world: int, trial: Trial, counted: str | None):
    """Three steps on the tokens of a mask, and log-probabilities after them. Some samples have no such token."""
    engine, batch = _begun(trial, rank)
    lengths, weight = batch["weight"].lengths, batch["weight"].values
    mask = weight > 0.6
    masked = {"counted": Packed(mask, lengths), "weight": Packed(weight * mask, lengths)}
    batch = SampleBatch(batch.ids, {**batch.data, **masked})
    steps = [
        engine.train_step(batch, _loss(engine), DENOMINATOR, len(LENGTHS), rate, SUMS, counted)
        for rate in RATES
    ]
    rows = engine.inference(batch, _rows(engine), trial.micro_batches, counted=counted)
    seen = None if rows is None else dict(zip(batch.ids, rows.split(), strict=True))
    return steps, seen, engine.flops


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize(
    "strategy", some((1, 1, 1), (4, 1, 1), (1, 2, 2), (1, 1, 2, 2), slow=[(1, 4, 1)]), ids=str
)
def test_a_head_without_the_tokens_that_do_not_count_gives_the_same(ranks, head: Head, strategy) -> None:
    plain = _trial("qwen3-tied", head, ParallelStrategy())
    steps, whole, flops = _on_one_rank(ranks, _counted, plain, None)
    masks = [weight > 0.6 for weight in _batch()["weight"].split()]
    assert not all(mask.any() for mask in masks)
    results = ranks.run(strategy.size, _counted, replace(plain, strategy=strategy), "counted")
    for of_rank, rows, _ in results:
        assert of_rank == [pytest.approx(step, rel=1e-9) for step in steps]
        for sample, mask in zip(_batch().ids, masks, strict=True):
            if rows is not None and sample in rows:
                want = torch.where(mask, whole[sample], 0.0) if head == "lm" else whole[sample]
                assert_close(rows[sample], want, rtol=1e-9, atol=1e-12)
    uncounted = sum(LENGTHS) - sum(int(mask.sum()) for mask in masks)
    # three steps of three passes, and one pass
    saved = 10 * head_flops(uncounted, SIZES["hidden_size"], SIZES["vocab_size"]) if head == "lm" else 0
    assert sum(flops for *_, flops in results) == pytest.approx(flops - saved, rel=1e-12)


def _poisoned(rank: int, world: int, trial: Trial):
    """One step whose loss is not a number on one replica, then three as they should be."""
    engine, batch = _begun(trial, rank)
    before = [p.detach().clone() for p in engine.stage.parameters()]
    bad = _loss(engine, poison=engine.coordinate.dp == 0)
    skipped = _step(engine, batch, bad, 2, 1e-2)["skipped"]
    unchanged = all(torch.equal(p, q) for p, q in zip(engine.stage.parameters(), before, strict=True))
    losses = [_step(engine, batch, _loss(engine), 2, rate)["loss"] for rate in RATES]
    return skipped, unchanged, losses


@pytest.mark.parametrize("strategy", some((2, 1, 2), (2, 2, 1)), ids=str)
def test_a_loss_that_is_not_finite_skips_the_step_on_all_ranks(ranks, strategy) -> None:
    trial = _trial("qwen3-tied", "lm", strategy)
    expected = _expected("qwen3-tied", "lm", torch.float64, None)
    for skipped, unchanged, losses in ranks.run(strategy.size, _poisoned, trial):
        assert (skipped, unchanged) == (1.0, True)
        assert losses == pytest.approx(expected.losses, rel=1e-9)


def _unpickled(rank: int, world: int, trial: Trial):
    """A step on ranks that send no Python objects; each replica gives one of LARGE_AND_SMALL."""

    def refuse(*_: object) -> None:
        raise AssertionError("a Python object was sent")

    engine, batch = _begun(trial, rank)
    sums = torch.tensor(LARGE_AND_SMALL[engine.coordinate.dp] / max(len(batch), 1), dtype=torch.float64)

    def loss(y: Tensor, micro: MicroBatch) -> LossTerms:
        terms = _loss(engine)(y, micro)
        return LossTerms(terms.total, {"sums": sums * len(micro.ids)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.distributed_c10d, "_object_to_tensor", refuse)
        return engine.train_step(batch, loss, DENOMINATOR, 2, 1e-2, ["sums"])


LARGE_AND_SMALL = (1.0, 6.0, 2.0**60, -(2.0**60))  # the second of four replicas has no samples


@pytest.mark.parametrize(("strategy", "total"), [((4, 1, 1), 0.0), ((2, 1, 2), 7.0)], ids=str)
def test_metrics_are_summed_in_the_order_of_the_ranks_and_nothing_is_pickled(ranks, strategy, total) -> None:
    """Ranks without samples and stages without a loss know the names too. In another order the total would be 1."""
    trial = _trial("llama", "lm", ParallelStrategy(*strategy))
    metrics = ranks.run(trial.strategy.size, _unpickled, trial)
    assert [m["sums"] for m in metrics] == [total] * trial.strategy.size
    assert metrics == [metrics[0]] * trial.strategy.size


def _untold(rank: int, world: int, trial: Trial, told: list[str]) -> str:
    engine, batch = _begun(trial, rank)
    with pytest.raises(ValueError, match="the loss gives the metrics") as refused:
        engine.train_step(batch, _loss(engine), DENOMINATOR, 2, 1e-2, told)
    return str(refused.value)


@pytest.mark.parametrize("told", [[], ["tokens"], ["rows", "tokens", "others"]], ids=len)
def test_a_loss_that_gives_other_metrics_than_the_step_was_told_is_refused(ranks, told: list[str]) -> None:
    (said,) = ranks.run(1, _untold, _trial("llama", "lm", ParallelStrategy()), told)
    assert f"['rows', 'tokens'], but the train step was told {sorted(told)}" in said


def _sums(rank: int, world: int, trial: Trial):
    engine = _engine(trial, rank)
    at = engine.coordinate
    values = torch.tensor([[1.0, 10.0 * at.dp]]) if engine.is_head else torch.full((1, 2), float("inf"))
    return engine.is_head, engine.sum_over_dp(values)


@pytest.mark.parametrize("strategy", some((1, 1, 1), (2, 2, 1)), ids=str)
def test_sums_over_dp_count_each_replica_once(ranks, strategy: ParallelStrategy) -> None:
    results = ranks.run(strategy.size, _sums, _trial("llama", "lm", strategy))
    assert sum(is_head for is_head, _ in results) == strategy.dp
    want = torch.tensor([[strategy.dp, 10 * sum(range(strategy.dp))]], dtype=torch.float64)
    for _, got in results:
        assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model", "head", "strategy", "how"),
    [
        *way("answers", "qwen3-tied", some((2, 2, 1), whole=[(1, 1, 1), (4, 1, 1), (1, 2, 2)], slow=EVERY)),
        *way("values", "qwen3-tied", some((2, 1, 2), slow=EVERY), "scalar"),
        *way("adapters", "qwen3-tied", some((1, 2, 2)), lora=LORA, recompute="selective"),
        *way("full recomputation", "qwen3-tied", some((1, 2, 2)), recompute="full"),
        *way("micro-batches: 4", "qwen3-tied", some((1, 2, 2)), micro_batches=4),
        *way("context", "qwen3-tied", some((1, 1, 2, 2), whole=[(2, 1, 1, 2), (1, 1, 1, 4)])),
        *way("context of values", "qwen3-tied", some((1, 2, 1, 2)), "scalar", recompute="selective"),
        *way("few tokens", "qwen3-tied", some((1, 2, 2)), micro_batches=1, micro_batch_tokens=30),
    ],
)
def test_shared_prompts_train_as_repeated_ones_under_any_layout(
    ranks, model: str, head: Head, strategy, how: dict
) -> None:
    """As on one rank that computes every prompt for each sample."""
    plain = _trial(model, head, ParallelStrategy(), lora=how.get("lora"), prompts=True)
    rows, flops, metrics, _, weights, _ = _on_one_rank(ranks, _train, plain, False)
    trial = replace(plain, strategy=strategy, **how)
    results = ranks.run(strategy.size, _train, trial)
    for rank, (of_rank, _, steps, _, after, _) in enumerate(results):
        assert steps == [pytest.approx(step, rel=1e-9) for step in metrics]
        for sample, values in (of_rank or {}).items():
            assert_close(values, rows[sample], rtol=1e-9, atol=1e-11)
        for name, weight in held_slices(trial.layout, rank, weights).items():
            assert_close(after[name], weight, rtol=1e-9, atol=1e-11)
    assert sum(result[1] for result in results) < 0.85 * flops


def _weights_there(rank: int, world: int, trial: Trial) -> tuple[int, int]:
    """Elements of weights that a rank has between passes, and the most that it has gathered in a step."""
    engine, batch = _begun(trial, rank)
    shares, most = engine.stage.shares, 0
    if shares is not None:
        enter = shares._enter

        def counted(part: int, then: int | None) -> None:
            nonlocal most
            enter(part, then)
            most = max(most, sum(g.values.untyped_storage().nbytes() // 8 for g in shares._whole))

        shares._enter = counted
    _step(engine, batch, _loss(engine), trial.micro_batches, 1e-2)
    return engine.master.weights.numel(), most


def test_a_rank_holds_its_share_of_the_weights_and_gathers_what_the_planner_has_room_for(ranks) -> None:
    """Half of what it holds of whole weights, and no more at a time than two parts of the model."""
    trial = _trial("llama", "lm", ParallelStrategy(2, shard="parameters"))
    whole = ranks.run(2, _weights_there, replace(trial, strategy=ParallelStrategy(2)))
    with patch.object(state_layout, "BUCKET", FEW):
        room = gathering(trial.layout)
    for (all_of_them, _), (share, most) in zip(whole, ranks.run(2, _weights_there, trial), strict=True):
        assert share == pytest.approx(all_of_them / 2, rel=0.03)
        assert most == pytest.approx(room.most, rel=0.15)
        assert most < 0.7 * all_of_them
