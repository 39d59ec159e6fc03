"""LoRA adapters over tiny models: folders as peft writes them, and commits. Import as `tests.adapter_folders`."""

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.checkpoint.commits import RunSnapshots
from prefect_rlhf.rlhf_tasks.checkpoint.snapshots import SnapshotWriter
from prefect_rlhf.rlhf_tasks.parallel.comm.groups import ProcessGroups
from prefect_rlhf.rlhf_tasks.protocol.messages import GenerationSpec, RunSpec, SavedPart, WriteCommit
from prefect_rlhf.rlhf_tasks.rank.plan_nodes import plan_device_sets
from prefect_rlhf.rlhf_tasks.rank.role_engines import RoleEngines
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.rlhf_tasks.algorithms.one_rank import CPU
from tests.rlhf_tasks.settings import limits

TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "phi3": ["qkv_proj", "o_proj", "down_proj"],
    "gemma4_text": ["q_proj", "o_proj", "per_layer_input_gate", "per_layer_projection"],
    "gpt_oss": ["q_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}


def write_adapter(folder: Path, base: Path, family: str = "llama", head: str = "lm", **changes: Any) -> Any:
    """Write an adapter of a saved model, none of whose halves is zero. Returns the model with it merged in."""
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    labels = {} if head == "lm" else {"num_labels": 1}
    model = kind.from_pretrained(base, dtype=torch.float64, experts_implementation="eager", **labels)
    config: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": TARGETS.get(family, ["q_proj", "o_proj", "down_proj"]),
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "fan_in_fan_out": family == "gpt2",
    }
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**{**config, **changes}))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.2, generator=generator)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload().eval()


def engines_of(config: PPOConfig, plan: ExecutionPlan) -> RoleEngines:
    return RoleEngines(plan, config, ProcessGroups(plan_device_sets(plan), 240.0, CPU))


def commit_of(config: PPOConfig, plan: ExecutionPlan, folder: Path) -> RoleEngines:
    """Train nothing, but give all adapters values and commit them as step 1."""
    folder.mkdir(exist_ok=True)
    engines, told = engines_of(config, plan), list[SavedPart]()
    generator = torch.Generator().manual_seed(0)
    fields = {
        "run": "test",
        "attempt": 1,
        "config": config.model_dump(mode="json"),
        "run_folder": str(folder),
    }
    writer = SnapshotWriter(
        GenerationSpec.model_construct(**fields, generation=0, rank=0, plan=plan), told.append
    )
    for role, engine in engines.changing():
        assert engine.optimizer is not None
        shards = list(engine.optimizer.shard_state())
        for shard in shards:
            if shard.kind == "master":
                shard.tensor.normal_(0, 0.1, generator=generator)
        engine.optimizer.load_shard_state(shards, 1)
        writer.save(role, engine, 1)
    writer.close()
    parts = {f"save_{part.role}": {0: part.details} for part in told}
    run = RunSpec(ranks=("a",), plan=plan, iterations=1, **fields, limits=limits())
    RunSnapshots(run).commit(WriteCommit(1, (), parts, 16, {"actor": 0, "critic": 0}, plan), {})
    return engines
