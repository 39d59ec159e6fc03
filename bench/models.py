"""Models with random weights, batches and engines, for benches of the engine alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from prefect_rlhf.flows.demo import byte_tokenizer
from prefect_rlhf.rlhf_tasks.parallel.batch.micro_batch import MicroBatch
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.parallel.comm.host_memory import Copier
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape, Recompute
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Interval, Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy, Placement
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.parallel.model.weights import stored_rows
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine, LossTerms
from prefect_rlhf.rlhf_tasks.parallel.train.optimizer import OptimizerSettings

CPU = torch.device("cpu")
LEARNING_RATE = 1e-4
OPTIMIZER = OptimizerSettings((0.9, 0.95), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


def sizes(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """Fields of a transformers configuration with tied embeddings and without special tokens."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        **more,
    }


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Write a model folder with the demo's tokenizer, for which a character is a token."""
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))


def random_tokens(lengths: Sequence[int], vocab: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (length,), generator=generator) for length in lengths]


def batch_of(key: str, sequences: Sequence[Tensor], device: torch.device = CPU) -> SampleBatch:
    return SampleBatch(tuple(range(len(sequences))), {key: Packed.of(list(sequences)).to(device)})


def build_engine(
    whole: PreTrainedModel, groups: ProcessGroups, copies: Copier | None = None, recompute: Recompute = "none"
) -> Engine:
    """A trainable engine on one rank with a model's weights and type.

    copies  copies the optimizer's state from and to host memory, where it is kept; None: it is on the device
    """
    config, placement = whole.config, Placement((0,), ParallelStrategy())
    layout = Layout(ModelShape.from_config(config.to_dict()), "lm", placement)
    stage = Stage(
        config,
        layout,
        placement.coordinate(0),
        None,
        device=groups.device,
        dtype=whole.dtype,
        recompute=recompute,
    )
    stored: dict[str, Tensor] = revert_weight_conversion(whole, dict(whole.named_parameters()))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, mine in stage.named_slices().items():
            spec = layout.specs[name]
            mine.copy_(stored_rows(stored.__getitem__, spec, Interval(0, spec.length)))
    return Engine(stage, layout, groups, OPTIMIZER, copies=copies)


def training(
    engine: Engine, sequences: Sequence[Tensor], micro_batches: int
) -> Callable[[], tuple[float, float]]:
    """One optimizer step of next-token prediction. Returns loss and gradient norm."""
    batch = batch_of("input_ids", sequences, engine.device)
    denominator = float(sum(len(s) - 1 for s in sequences))

    def loss(logits: Tensor, micro: MicroBatch) -> LossTerms:
        return LossTerms(-engine.logprobs(logits, micro).sum(), {})

    def run() -> tuple[float, float]:
        report = engine.train_step(batch, loss, denominator, micro_batches, LEARNING_RATE)
        return report["loss"], report["grad_norm"]

    return run
