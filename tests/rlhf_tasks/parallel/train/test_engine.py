"""Engines of 1, 2 and 4 ranks against plain transformers and torch's AdamW in one process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from rlhf_tasks.parallel.batch import micro_batch
from rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from rlhf_tasks.parallel.comm.groups import ProcessGroups, device_sets
from rlhf_tasks.parallel.layout.flops import forward_flops, head_flops, training_flops
from rlhf_tasks.parallel.layout.shape import Lora, Recompute
from rlhf_tasks.parallel.layout.slices import Head, Layout, ModelShape
from rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from rlhf_tasks.parallel.model.stage import Stage
from rlhf_tasks.parallel.train.engine import Engine, Loss, LossTerms, share_batch
from rlhf_tasks.parallel.train.optimizer import OptimizerSettings
from tests.tiny_models import by_our_names, held_slices, of_tensor

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
}
STRATEGIES = [
    ParallelStrategy(*degrees)
    for degrees in [
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
        (4, 1, 1),
        (1, 4, 1),
        (1, 1, 4),
        (2, 2, 1),
        (2, 1, 2),
        (1, 2, 2),
    ]
]


def covering(first: tuple[int, int, int], *further: tuple[int, int, int]) -> list[Any]:
    """All strategies, marked by who runs them: the default suite the first, continuous integration the further ones
    too, `make test-slow` all.

    These keep what is new under them: ends in several stages and heads that tp does not divide where weights are
    tied, a replica without samples (dp 4), and each kind of split together with another one.
    """

    def marks(strategy: ParallelStrategy) -> Any:
        degrees = (strategy.dp, strategy.tp, strategy.pp)
        return () if degrees == first else pytest.mark.whole if degrees in further else pytest.mark.slow

    return [pytest.param(strategy, marks=marks(strategy)) for strategy in STRATEGIES]


EVERY = [
    s
    if (s.dp, s.tp, s.pp) in [(1, 1, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2)]
    else pytest.param(s, marks=pytest.mark.whole)
    for s in STRATEGIES
]
SPLIT_AND_WHOLE = [
    ParallelStrategy(1, 2, 2),
    pytest.param(ParallelStrategy(1, 1, 1), marks=pytest.mark.whole),
]


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
    settings: OptimizerSettings = SETTINGS
    lora: Lora | None = None
    micro_batch_tokens: int | None = None
    recompute: Recompute = "none"

    @property
    def layout(self) -> Layout:
        shape = ModelShape.from_config(self.config.to_dict())
        placement = Placement(tuple(range(self.strategy.size)), self.strategy)
        return Layout(shape, self.head, placement, self.lora)


def _batch() -> SampleBatch:
    """Samples of different lengths, with a weight on each token but each sample's first."""
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS]
    weights = [torch.rand(length, generator=generator, dtype=torch.float64) for length in LENGTHS]
    for weight in weights:
        weight[0] = 0.0
    ids = tuple(range(100, 100 + len(LENGTHS)))
    return SampleBatch(ids, {"input_ids": Packed.of(tokens), "weight": Packed.of(weights)})


DENOMINATOR = float(_batch()["weight"].values.sum())


def _part(dp_rank: int, dp: int) -> SampleBatch:
    """A replica's share: uneven, and for dp = 4 one replica has nothing."""
    batch = _batch()
    if dp == 4:
        bounds = (0, 1, 1, 4, 7)
        return batch.select(batch.ids[bounds[dp_rank] : bounds[dp_rank + 1]])
    return batch.select(batch.ids[dp_rank::dp])


# On the ranks


def _engine(trial: Trial, rank: int) -> Engine:
    layout = trial.layout
    groups = ProcessGroups(device_sets(layout.placement), 240.0, torch.device("cpu"))
    dtype = next(iter(trial.weights.values())).dtype
    stage = Stage(
        trial.config,
        layout,
        layout.placement.coordinate(rank),
        groups[layout.placement.tp_group(rank)],
        device=torch.device("cpu"),
        dtype=dtype,
        recompute=trial.recompute,
    )
    with torch.no_grad():
        for part, slices in ((layout.whole, stage.named_slices()), (layout, stage.trained_slices())):
            for name, mine in held_slices(part, rank, trial.weights).items():
                slices[name].copy_(mine)
    return Engine(stage, layout, groups, trial.settings, micro_batch_tokens=trial.micro_batch_tokens)


def _shared(engine: Engine, rank: int) -> SampleBatch:
    at = engine.coordinate
    mine = _part(at.dp, engine.placement.strategy.dp) if engine.is_head else None
    return share_batch(mine, engine.placement, engine.groups, rank)


def _rows(engine: Engine, y: Tensor, micro: MicroBatch) -> Tensor:
    """What is looked at per token: log-probabilities, or the values themselves."""
    return engine.logprobs(y, micro, TEMPERATURE) if engine.layout.head == "lm" else y


def _loss(engine: Engine, poison: bool = False) -> Loss:
    def loss(y: Tensor, micro: MicroBatch) -> LossTerms:
        rows = _rows(engine, y, micro)
        weight = micro.data["weight"].to(rows.dtype)
        total = (weight * rows.square()).sum() - (weight * rows).sum()
        total = total + float("nan") if poison else total  # its gradient stays finite
        return LossTerms(total, {"tokens": weight.sum(), "rows": (weight * rows).sum()})

    return loss


def _step(engine: Engine, batch: SampleBatch, loss: Loss, micro_batches: int, rate: float):
    return engine.train_step(batch, loss, DENOMINATOR, micro_batches, rate, SUMS)


def _train(rank: int, world: int, trial: Trial):
    """Rows before training, metrics of three steps, the first step's gradients, the last step's weights."""
    engine = _engine(trial, rank)
    batch = _shared(engine, rank)
    rows = engine.inference(batch, lambda y, micro: _rows(engine, y, micro), trial.micro_batches)
    metrics, gradients = [], {}
    for rate in RATES:
        metrics.append(_step(engine, batch, _loss(engine), trial.micro_batches, rate))
        if not gradients:
            gradients = _first_gradients(engine)
    weights = {name: p.detach().clone() for name, p in engine.stage.trained_slices().items()}
    frozen = [
        name
        for name, mine in held_slices(trial.layout.whole, rank, trial.weights).items()
        if name not in weights and not torch.equal(engine.stage.named_slices()[name], mine)
    ]
    assert not frozen, f"training has changed {frozen}"
    return (None if rows is None else (batch.ids, rows.split())), metrics, gradients, weights


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
        if config.model_type in ("mixtral", "gpt2"):
            layout, prefix = (
                Trial(config, self.head, {}, ParallelStrategy()).layout,
                self._whole[0].base_model_prefix,
            )
            theirs = {name.replace("model.", f"{prefix}.", 1): tensor for name, tensor in tensors.items()}
            tensors = by_our_names(layout, self._whole[0], theirs)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def weights(self) -> dict[str, Tensor]:
        return self.named(dict(self.named_parameters()))


@dataclass(frozen=True)
class Expected:
    start: dict[str, Tensor]
    rows: list[Tensor]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


_EXPECTED: dict[tuple, Expected] = {}
_ON_ONE_RANK: dict[tuple, Any] = {}


def _expected(model: str, head: Head, dtype: torch.dtype, lora: Lora | None = None) -> Expected:
    """Three steps of plain training. Computed once per model."""
    key = (model, head, dtype, lora)
    if key not in _EXPECTED:
        _EXPECTED[key] = _train_plain(Plain(CONFIGS[model], head, dtype, lora))
    return _EXPECTED[key]


def _on_one_rank(ranks, function: Callable, trial: Trial, *rest: Any) -> Any:
    """What a function of ranks gives on one rank. Computed once per function, head and adapters."""
    key = (function.__name__, trial.head, trial.lora, rest)
    if key not in _ON_ONE_RANK:
        (_ON_ONE_RANK[key],) = ranks.run(1, function, trial, *rest)
    return _ON_ONE_RANK[key]


def _train_plain(plain: Plain) -> Expected:
    start, batch = plain.weights(), _batch()
    trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    decayed = [p for p in trained.values() if p.ndim > 1]
    others = [p for p in trained.values() if p.ndim == 1]
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
    return Expected(start, first_rows, losses, norms, gradients, plain.weights())


# Comparisons


def _assert_equal(results: list, trial: Trial, expected: Expected, rows: float, relative: float) -> None:
    """rows: absolute bound of log-probabilities or values; relative: of all else, to a tensor's largest."""
    layout = trial.layout
    seen: dict[int, Tensor] = {}
    for rank, (got_rows, metrics, gradients, weights) in enumerate(results):
        at = layout.placement.coordinate(rank)
        assert (got_rows is not None) == (at.pp == trial.strategy.pp - 1)
        if got_rows is not None:
            seen.update(zip(*got_rows, strict=True))
        assert metrics == results[0][1]
        assert [m["loss"] for m in metrics] == pytest.approx(expected.losses, rel=relative)
        assert [m["grad_norm"] for m in metrics] == pytest.approx(expected.norms, rel=relative)
        assert [m["skipped"] for m in metrics] == [0.0] * len(RATES)
        assert [list(m) for m in metrics] == [[*SUMS, "loss", "grad_norm", "skipped"]] * len(RATES)
        assert metrics[0]["tokens"] == pytest.approx(DENOMINATOR, rel=relative)
        theirs = held_slices(layout, rank, expected.gradients)
        for name, shards in gradients.items():
            _assert_close(
                [t for _, _, t in shards],
                [theirs[name].flatten()[start:stop] for start, stop, _ in shards],
                of_tensor(layout, expected.gradients, name).abs().max().item() * relative,
                f"gradient of {name}",
            )
        for name, weight in held_slices(layout, rank, expected.weights).items():
            _assert_close([weights[name]], [weight], weight.abs().max().item() * relative, name)
    for sample, want in zip(_batch().ids, expected.rows, strict=True):
        _assert_close([seen[sample]], [want], rows, f"rows of sample {sample}")


def _assert_close(got: list[Tensor], want: list[Tensor], bound: float, what: str) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape == theirs.shape, what
        error = (ours - theirs).abs().max().item() if ours.numel() else 0.0
        assert error <= bound, f"{what}: off by {error}, allowed {bound}"


def _compare(ranks, model: str, head: Head, strategy: ParallelStrategy, dtype, rows, relative, **how) -> None:
    expected = _expected(model, head, dtype, how.get("lora"))
    trial = Trial(CONFIGS[model], head, expected.start, strategy, **how)
    _assert_equal(ranks.run(strategy.size, _train, trial), trial, expected, rows, relative)


@pytest.mark.parametrize("strategy", EVERY, ids=str)
def test_training_equals_plain_transformers_in_float64(ranks, strategy: ParallelStrategy) -> None:
    _compare(ranks, "llama", "lm", strategy, torch.float64, rows=1e-10, relative=1e-9)


@pytest.mark.parametrize("strategy", covering((1, 2, 2), (1, 1, 2), (1, 4, 1), (2, 2, 1)), ids=str)
def test_so_it_does_with_tied_weights_and_norms_of_heads(ranks, strategy: ParallelStrategy) -> None:
    _compare(ranks, "qwen3-tied", "lm", strategy, torch.float64, rows=1e-10, relative=1e-9)


@pytest.mark.parametrize(
    "strategy",
    [
        ParallelStrategy(2, 1, 2),
        *(pytest.param(ParallelStrategy(dp, 1, 1), marks=pytest.mark.whole) for dp in (1, 2, 4)),
    ],
    ids=str,
)
def test_micro_batches_of_at_most_so_many_tokens_train_alike(ranks, strategy: ParallelStrategy) -> None:
    """Replicas have different numbers of them."""
    few = {"micro_batches": 1, "micro_batch_tokens": 9}
    _compare(ranks, "llama", "lm", strategy, torch.float64, rows=1e-10, relative=1e-9, **few)


@pytest.mark.parametrize("strategy", covering((2, 1, 2), (1, 1, 1), (4, 1, 1), (1, 2, 2)), ids=str)
def test_values_train_like_plain_transformers(ranks, strategy: ParallelStrategy) -> None:
    _compare(ranks, "qwen3-tied", "scalar", strategy, torch.float64, rows=1e-10, relative=1e-9)


@pytest.mark.parametrize("strategy", covering((2, 2, 1), (1, 1, 1), (1, 2, 2)), ids=str)
def test_float32_agrees_to_rounding(ranks, strategy: ParallelStrategy) -> None:
    _compare(ranks, "llama-tied", "lm", strategy, torch.float32, rows=1e-5, relative=1e-5)


@pytest.mark.parametrize("strategy", covering((1, 2, 2), (1, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1)), ids=str)
def test_experts_train_as_those_of_transformers(ranks, strategy: ParallelStrategy) -> None:
    _compare(ranks, "mixtral", "lm", strategy, torch.float64, rows=1e-10, relative=1e-9)


@pytest.mark.parametrize("strategy", covering((1, 2, 2), *((s.dp, s.tp, s.pp) for s in STRATEGIES)), ids=str)
def test_packed_and_transposed_projections_train_as_those_of_transformers(
    ranks, strategy: ParallelStrategy
) -> None:
    _compare(ranks, "gpt2", "lm", strategy, torch.float64, rows=1e-10, relative=1e-9)


@pytest.mark.parametrize("strategy", SPLIT_AND_WHOLE, ids=str)
@pytest.mark.parametrize("model", ["llama-tied", "qwen3"])
def test_tied_and_untied_of_each_family(ranks, model: str, strategy: ParallelStrategy) -> None:
    _compare(ranks, model, "lm", strategy, torch.float64, rows=1e-10, relative=1e-9)


@pytest.mark.parametrize(
    ("strategy", "micro_batches"),
    [
        *((ParallelStrategy(2, 1, 2), n) for n in (1, 3, 7)),
        (ParallelStrategy(1, 1, 1), 3),
        *(pytest.param(ParallelStrategy(1, 1, 1), n, marks=pytest.mark.slow) for n in (1, 7)),
    ],
    ids=str,
)
def test_the_number_of_micro_batches_changes_nothing(ranks, strategy, micro_batches: int) -> None:
    how = {"rows": 1e-10, "relative": 1e-9, "micro_batches": micro_batches}
    _compare(ranks, "llama", "lm", strategy, torch.float64, **how)


LORA = Lora(3, 5.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


@pytest.mark.parametrize("strategy", covering((1, 2, 2), (1, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1)), ids=str)
def test_adapters_train_as_with_merged_weights_in_one_process(ranks, strategy: ParallelStrategy) -> None:
    how = {"rows": 1e-10, "relative": 1e-9, "lora": LORA}
    _compare(ranks, "qwen3-tied", "lm", strategy, torch.float64, **how)


@pytest.mark.parametrize("strategy", SPLIT_AND_WHOLE, ids=str)
@pytest.mark.parametrize("targets", [("k_proj", "down_proj"), ("o_proj",)], ids="+".join)
def test_adapters_of_some_layers_and_a_value_head(ranks, strategy, targets: tuple[str, ...]) -> None:
    how = {"rows": 1e-10, "relative": 1e-9, "lora": replace(LORA, targets=targets)}
    _compare(ranks, "llama", "scalar", strategy, torch.float64, **how)


@pytest.mark.parametrize(
    "strategy",
    [
        ParallelStrategy(1, 2, 2),
        *(pytest.param(ParallelStrategy(*s), marks=pytest.mark.slow) for s in [(1, 2, 1), (2, 1, 1)]),
    ],
    ids=str,
)
@pytest.mark.parametrize(("recompute", "lora"), [("selective", None), ("selective", LORA), ("full", LORA)])
def test_what_is_recomputed_changes_nothing(ranks, strategy, recompute: Recompute, lora: Lora | None) -> None:
    how = {"rows": 1e-10, "relative": 1e-9, "lora": lora, "recompute": recompute}
    _compare(ranks, "qwen3-tied", "lm", strategy, torch.float64, **how)


def _work(rank: int, world: int, trial: Trial):
    engine = _engine(trial, rank)
    batch = _shared(engine, rank)
    engine.inference(batch, lambda y, micro: _rows(engine, y, micro), trial.micro_batches)
    _step(engine, batch, _loss(engine), trial.micro_batches, 1e-2)
    return engine.flops


@pytest.mark.parametrize("strategy", [ParallelStrategy(1, 1, 1), ParallelStrategy(2, 1, 2)], ids=str)
def test_the_work_of_all_ranks_is_the_models_however_it_is_split(ranks, strategy) -> None:
    """One forward pass, and a step of three."""
    trial = Trial(CONFIGS["llama"], "lm", _expected("llama", "lm", torch.float64).start, strategy)
    layout = trial.layout
    assert sum(ranks.run(strategy.size, _work, trial)) == 4 * forward_flops(layout.shape, "lm", LENGTHS)


@pytest.mark.parametrize("strategy", [ParallelStrategy(1, 1, 1), ParallelStrategy(2, 1, 2)], ids=str)
def test_the_work_with_adapters_leaves_out_the_gradients_of_frozen_weights(ranks, strategy) -> None:
    start = _expected("llama", "lm", torch.float64, LORA).start
    trial = Trial(CONFIGS["llama"], "lm", start, strategy, lora=LORA)
    shape = trial.layout.shape
    expected = sum(passes(shape, "lm", LENGTHS, None, LORA) for passes in (forward_flops, training_flops))
    assert sum(ranks.run(strategy.size, _work, trial)) == pytest.approx(expected)


def _counted(rank: int, world: int, trial: Trial, counted: str | None):
    """Three steps on the tokens of a mask, and log-probabilities after them. Some samples have no such token."""
    engine = _engine(trial, rank)
    batch = _shared(engine, rank)
    lengths, weight = batch["weight"].lengths, batch["weight"].values
    mask = weight > 0.6
    masked = {"counted": Packed(mask, lengths), "weight": Packed(weight * mask, lengths)}
    batch = SampleBatch(batch.ids, {**batch.data, **masked})
    steps = [
        engine.train_step(batch, _loss(engine), DENOMINATOR, len(LENGTHS), rate, SUMS, counted)
        for rate in RATES
    ]
    rows = engine.inference(
        batch, lambda y, micro: _rows(engine, y, micro), trial.micro_batches, counted=counted
    )
    seen = None if rows is None else dict(zip(batch.ids, rows.split(), strict=True))
    return steps, seen, engine.flops


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize(
    "strategy",
    [
        *(ParallelStrategy(*s) for s in [(1, 1, 1), (4, 1, 1), (1, 2, 2)]),
        pytest.param(ParallelStrategy(1, 4, 1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_head_without_the_tokens_that_do_not_count_gives_the_same(ranks, head: Head, strategy) -> None:
    start = _expected("qwen3-tied", head, torch.float64).start
    plain = Trial(CONFIGS["qwen3-tied"], head, start, ParallelStrategy())
    steps, whole, flops = _on_one_rank(ranks, _counted, plain, None)
    masks = [weight > 0.6 for weight in _batch()["weight"].split()]
    assert not all(mask.any() for mask in masks)
    results = ranks.run(strategy.size, _counted, replace(plain, strategy=strategy), "counted")
    for of_rank, rows, _ in results:
        assert of_rank == [pytest.approx(step, rel=1e-9) for step in steps]
        for sample, mask in zip(_batch().ids, masks, strict=True):
            if rows is not None and sample in rows:
                want = torch.where(mask, whole[sample], 0.0) if head == "lm" else whole[sample]
                torch.testing.assert_close(rows[sample], want, rtol=1e-9, atol=1e-12)
    uncounted = sum(LENGTHS) - sum(int(mask.sum()) for mask in masks)
    saved = 10 * head_flops(
        uncounted, SIZES["hidden_size"], SIZES["vocab_size"]
    )  # three steps of three passes, one pass
    assert sum(flops for *_, flops in results) == pytest.approx(
        flops - (saved if head == "lm" else 0), rel=1e-12
    )


def _all_counted(rank: int, world: int, trial: Trial):
    """The work of a forward pass in which all tokens count."""
    engine = _engine(trial, rank)
    batch = _shared(engine, rank)
    everywhere = torch.ones(len(batch["weight"].values), dtype=torch.bool)
    batch = SampleBatch(batch.ids, {**batch.data, "counted": Packed(everywhere, batch["weight"].lengths)})
    engine.inference(batch, lambda y, micro: _rows(engine, y, micro), 2, counted="counted")
    return engine.flops


@pytest.mark.parametrize("strategy", [ParallelStrategy(1, 1, 1), ParallelStrategy(4, 1, 1)], ids=str)
def test_the_first_tokens_are_predicted_by_none_and_are_no_work_of_the_head(ranks, strategy) -> None:
    trial = Trial(CONFIGS["llama"], "lm", _expected("llama", "lm", torch.float64).start, strategy)
    predicted = sum(LENGTHS) - len(LENGTHS)
    expected = forward_flops(trial.layout.shape, "lm", LENGTHS, predicted)
    assert sum(ranks.run(strategy.size, _all_counted, trial)) == expected


def _poisoned(rank: int, world: int, trial: Trial):
    """One step whose loss is not a number on one replica, then three as they should be."""
    engine = _engine(trial, rank)
    batch = _shared(engine, rank)
    before = [p.detach().clone() for p in engine.stage.parameters()]
    bad = _loss(engine, poison=engine.coordinate.dp == 0)
    skipped = _step(engine, batch, bad, 2, 1e-2)["skipped"]
    unchanged = all(torch.equal(p, q) for p, q in zip(engine.stage.parameters(), before, strict=True))
    losses = [_step(engine, batch, _loss(engine), 2, rate)["loss"] for rate in RATES]
    return skipped, unchanged, losses


@pytest.mark.parametrize("strategy", [ParallelStrategy(2, 1, 2), ParallelStrategy(2, 2, 1)], ids=str)
def test_a_loss_that_is_not_finite_skips_the_step_on_all_ranks(ranks, strategy) -> None:
    expected = _expected("qwen3-tied", "lm", torch.float64)
    trial = Trial(CONFIGS["qwen3-tied"], "lm", expected.start, strategy)
    for skipped, unchanged, losses in ranks.run(strategy.size, _poisoned, trial):
        assert (skipped, unchanged) == (1.0, True)
        assert losses == pytest.approx(expected.losses, rel=1e-9)


def _unpickled(rank: int, world: int, trial: Trial):
    """A step on ranks that send no Python objects; each replica gives one of LARGE_AND_SMALL."""

    def refuse(*_: object) -> None:
        raise AssertionError("a Python object was sent")

    engine = _engine(trial, rank)
    batch = _shared(engine, rank)
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
    start = _expected("llama", "lm", torch.float64).start
    trial = Trial(CONFIGS["llama"], "lm", start, ParallelStrategy(*strategy))
    metrics = ranks.run(trial.strategy.size, _unpickled, trial)
    assert [m["sums"] for m in metrics] == [total] * trial.strategy.size
    assert metrics == [metrics[0]] * trial.strategy.size


def _untold(rank: int, world: int, trial: Trial, told: list[str]) -> str:
    engine = _engine(trial, rank)
    with pytest.raises(ValueError, match="the loss gives the metrics") as refused:
        engine.train_step(_shared(engine, rank), _loss(engine), DENOMINATOR, 2, 1e-2, told)
    return str(refused.value)


@pytest.mark.parametrize("told", [[], ["tokens"], ["rows", "tokens", "others"]], ids=len)
def test_a_loss_that_gives_other_metrics_than_the_step_was_told_is_refused(ranks, told: list[str]) -> None:
    start = _expected("llama", "lm", torch.float64).start
    trial = Trial(CONFIGS["llama"], "lm", start, ParallelStrategy(1, 1, 1))
    (said,) = ranks.run(1, _untold, trial, told)
    assert f"['rows', 'tokens'], but the train step was told {sorted(told)}" in said


def _sums(rank: int, world: int, trial: Trial):
    engine = _engine(trial, rank)
    at = engine.coordinate
    values = torch.tensor([[1.0, 10.0 * at.dp]]) if engine.is_head else torch.full((1, 2), float("inf"))
    return engine.is_head, engine.sum_over_dp(values)


@pytest.mark.parametrize("strategy", [ParallelStrategy(1, 1, 1), ParallelStrategy(2, 2, 1)], ids=str)
def test_sums_over_dp_count_each_replica_once(ranks, strategy: ParallelStrategy) -> None:
    trial = Trial(CONFIGS["llama"], "lm", _expected("llama", "lm", torch.float64).start, strategy)
    results = ranks.run(strategy.size, _sums, trial)
    assert sum(is_head for is_head, _ in results) == strategy.dp
    want = torch.tensor([[strategy.dp, 10 * sum(range(strategy.dp))]], dtype=torch.float64)
    for _, got in results:
        torch.testing.assert_close(got, want, rtol=0, atol=0)


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
    weights = [torch.rand(len(sample), generator=generator, dtype=torch.float64) for sample in samples]
    for weight in weights:
        weight[0] = 0.0
    mine = [place for place, number in enumerate((0, 0, 0, 1, 1, 1, 2)) if number % dp == dp_rank]
    batch = SampleBatch(
        tuple(range(len(samples))), {"input_ids": Packed.of(samples), "weight": Packed.of(weights)}
    )
    return batch.take(mine)


def _in_groups(rank: int, world: int, trial: Trial, sharing: bool):
    """Rows, metrics of three steps, first gradients, weights and FLOPs; with or without sharing of prompts."""
    engine = _engine(trial, rank)
    at = engine.coordinate
    mine = _groups(at.dp, engine.placement.strategy.dp) if engine.is_head else None
    batch = share_batch(mine, engine.placement, engine.groups, rank)
    with pytest.MonkeyPatch.context() as patch:
        if not sharing:
            patch.setattr(micro_batch, "LEAST_SHARED", 1000)
        rows = engine.inference(batch, lambda y, micro: _rows(engine, y, micro), trial.micro_batches)
        flops, metrics = engine.flops, []
        for rate in RATES:
            metrics.append(_step(engine, batch, _loss(engine), trial.micro_batches, rate))
    weights = {name: p.detach().clone() for name, p in engine.stage.trained_slices().items()}
    return (
        None if rows is None else dict(zip(batch.ids, rows.split(), strict=True)),
        metrics,
        weights,
        flops,
    )


@pytest.mark.parametrize("strategy", covering((2, 2, 1), (1, 1, 1), (4, 1, 1), (1, 2, 2)), ids=str)
def test_shared_prompts_train_as_repeated_ones_under_any_layout(ranks, strategy) -> None:
    _compare_sharing(ranks, "lm", strategy)


@pytest.mark.parametrize("strategy", covering((2, 1, 2)), ids=str)
def test_so_they_do_with_a_value_head(ranks, strategy) -> None:
    _compare_sharing(ranks, "scalar", strategy)


@pytest.mark.parametrize(
    "how",
    [
        {"lora": LORA, "recompute": "selective"},
        {"recompute": "full"},
        {"micro_batches": 4},
        {"micro_batches": 1, "micro_batch_tokens": 30},
    ],
    ids=str,
)
def test_so_they_do_with_adapters_recomputation_and_other_micro_batches(ranks, how: dict) -> None:
    _compare_sharing(ranks, "lm", ParallelStrategy(1, 2, 2), **how)


def _compare_sharing(ranks, head: Head, strategy: ParallelStrategy, **how) -> None:
    """Against one rank that computes every prompt for each sample."""
    start = _expected("qwen3-tied", head, torch.float64, how.get("lora")).start
    plain = Trial(CONFIGS["qwen3-tied"], head, start, ParallelStrategy(), lora=how.get("lora"))
    rows, metrics, weights, flops = _on_one_rank(ranks, _in_groups, plain, False)
    trial = replace(plain, strategy=strategy, **how)
    results = ranks.run(strategy.size, _in_groups, trial, True)
    for rank, (of_rank, steps, after, _) in enumerate(results):
        assert steps == [pytest.approx(step, rel=1e-9) for step in metrics]
        for sample, values in (of_rank or {}).items():
            torch.testing.assert_close(values, rows[sample], rtol=1e-9, atol=1e-11)
        for name, weight in held_slices(trial.layout, rank, weights).items():
            torch.testing.assert_close(after[name], weight, rtol=1e-9, atol=1e-11)
    assert sum(flops for *_, flops in results) < 0.85 * flops
