"""TRL's half of `bench.vs_trl` and `bench.trl_names`, which run this file in an environment that has TRL: it imports
nothing of ours.

    python trl_side.py WORK.json OUT.json
    python trl_side.py

WORK.json is a `Work` of bench/vs_trl.py. OUT.json gets one row for each iteration: its seconds (whole, and where it
samples generation, scoring, training) and the CPU seconds of this process.

Without arguments the fields of TRL's configurations are printed as JSON: {"version": ..., "fields": {our algorithm:
{field: default}}}; a default that JSON does not know is written as text.
"""

# pyright: reportMissingImports=false
import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from runpy import run_path

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

CONFIGURATIONS = {
    "ppo": ("trl.experimental.ppo", "PPOConfig"),
    "grpo": ("trl", "GRPOConfig"),
    "rloo": ("trl", "RLOOConfig"),
    "dpo": ("trl", "DPOConfig"),
    "kto": ("trl", "KTOConfig"),
    "sft": ("trl", "SFTConfig"),
    "reward_model": ("trl", "RewardConfig"),
    "distillation": ("trl.experimental.gkd", "GKDConfig"),
    "lora": ("trl", "ModelConfig"),
}


class Clock(TrainerCallback):
    """Notes the times of an iteration. `mark` is called at the borders inside it."""

    def __init__(self):
        self.rows, self._marks, self._cpu = [], [time.perf_counter()], time.process_time()

    def mark(self):
        self._marks.append(time.perf_counter())

    def on_train_begin(self, args, state, control, **_):
        self._marks, self._cpu = [time.perf_counter()], time.process_time()

    def on_step_end(self, args, state, control, **_):
        self.mark()
        row = {"iteration": self._marks[-1] - self._marks[0], "cpu": time.process_time() - self._cpu}
        if len(self._marks) == 4:
            for place, part in enumerate(("generation", "scoring", "training")):
                row[part] = self._marks[place + 1] - self._marks[place]
        self.rows.append(row)
        self._marks, self._cpu = [time.perf_counter()], time.process_time()


def mark_after(clock, owner, *names):
    """Mark the end of every call of functions of a module or a class of TRL's."""
    for name in names:
        inner = getattr(owner, name)

        def timed(*arguments, _inner=inner, **named):
            result = _inner(*arguments, **named)
            clock.mark()
            return result

        setattr(owner, name, timed)


def common(work):
    """Settings of any trainer: nothing is written, logged or evaluated; bfloat16 as autocast, TRL's default."""
    return {
        "output_dir": f"{work['folder']}/trl",
        "per_device_train_batch_size": work["batch_size"],
        "gradient_accumulation_steps": 1,
        "learning_rate": work["learning_rate"],
        "max_grad_norm": 1.0,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "lr_scheduler_type": "constant",
        "bf16": work["dtype"] == "bfloat16",
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "seed": 1234,
    }


def causal(work):
    return AutoModelForCausalLM.from_pretrained(f"{work['folder']}/actor", dtype=torch.float32)


def scalar(work):
    return AutoModelForSequenceClassification.from_pretrained(
        f"{work['folder']}/reward", num_labels=1, dtype=torch.float32
    )


def ppo(work, rows, clock):
    """TRL's PPO. Generation ends where `batch_generation` does, scoring where the advantages are whitened."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    mark_after(clock, ppo_trainer, "batch_generation", "masked_whiten")
    tokens, batch = tokenizer(work), work["batch_size"]
    config = PPOConfig(
        **common(work),
        num_mini_batches=4,
        total_episodes=batch * work["iterations"],
        local_rollout_forward_batch_size=batch,
        num_ppo_epochs=1,
        response_length=work["new_tokens"],
        temperature=1.0,  # as ours; with TRL's default of .7 the end token would come five times as often
        stop_token=None if work["full_length"] else "eos",
        kl_coef=0.05,
        gamma=1.0,
        lam=0.95,
        num_sample_generations=0,
    )
    return PPOTrainer(
        args=config,
        processing_class=tokens,
        model=causal(work),
        ref_model=causal(work),
        reward_model=scalar(work),
        value_model=scalar(work),
        train_dataset=Dataset.from_dict({"input_ids": [tokens(row["prompt"])["input_ids"] for row in rows]}),
        callbacks=[clock],
    )


def one_step(work, rows, clock):
    """The others: one optimizer step an iteration, of GRPO and RLOO on groups of samples.

    Their scoring is all between the last token and the advantages.
    """
    import trl

    algorithm = work["algorithm"]
    name = {"reward_model": "Reward"}.get(algorithm, algorithm.upper())
    trainer = getattr(trl, f"{name}Trainer")
    model = scalar(work) if algorithm == "reward_model" else causal(work)
    settings, more = {"max_length": work["length"]}, {}
    if algorithm in ("grpo", "rloo"):
        mark_after(clock, trainer, "_generate", "_generate_and_score_completions")
        settings = {
            "num_generations": work["group"],
            "max_completion_length": work["new_tokens"],
            "beta": 0.05,
            "temperature": 1.0,
            "generation_kwargs": {"eos_token_id": model.config.eos_token_id},
        }
        more = {"reward_funcs": run_path(f"{work['folder']}/rewards.py")["share_of_vowels"]}
    elif algorithm == "dpo":
        settings["beta"] = 0.1
        more = {"ref_model": causal(work)}
    return trainer(
        model=model,
        args=getattr(trl, f"{name}Config")(**common(work), max_steps=work["iterations"], **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(work),
        callbacks=[clock],
        **more,
    )


def tokenizer(work):
    return PreTrainedTokenizerFast(
        tokenizer_file=f"{work['folder']}/actor/tokenizer.json",
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )


def defaults():
    """{our algorithm: {field: default}} of the installed release."""
    fields = {}
    for algorithm, (module, name) in CONFIGURATIONS.items():
        try:
            configuration = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):  # a release has it no more, or not yet
            continue
        fields[algorithm] = {field.name: default(field) for field in dataclasses.fields(configuration)}
        fields[algorithm] = dict(sorted(fields[algorithm].items()))
    return fields


def default(field):
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def main():
    if len(sys.argv) == 1:
        version = importlib.import_module("trl").__version__
        print(json.dumps({"version": version, "fields": defaults()}, default=str))
        return
    work, out, clock = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Clock()
    lines = Path(work["folder"], f"{work['algorithm']}.jsonl").read_text().splitlines()
    begin = ppo if work["algorithm"] == "ppo" else one_step
    begin(work, [json.loads(line) for line in lines], clock).train()
    out.write_text(json.dumps(clock.rows))


if __name__ == "__main__":
    main()
