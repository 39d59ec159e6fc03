"""TRL's half of `bench.vs_trl`, which runs this file in an environment that has TRL: it imports nothing of ours.

    python trl_side.py WORK.json OUT.json

WORK.json is a `Work` of bench/vs_trl.py. OUT.json gets one row for each iteration: its seconds (whole, and where it
samples generation, scoring, training) and the CPU seconds of this process.
"""

# pyright: reportMissingImports=false
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


def tokenizer(folder):
    """Of a model folder of ours."""
    return PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def common(work, rows_per_step):
    """Settings of any trainer: nothing is written, logged or evaluated; bfloat16 as autocast, TRL's default."""
    return {
        "output_dir": f"{work['folder']}/trl",
        "per_device_train_batch_size": rows_per_step,
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


def texts(work):
    path = Path(work["folder"], f"{work['algorithm']}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def ppo(work, clock):
    """TRL's PPO. Generation ends where `batch_generation` does, scoring where the advantages are whitened."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    mark_after(clock, ppo_trainer, "batch_generation", "masked_whiten")
    tokens = tokenizer(f"{work['folder']}/actor")
    ids = [tokens(row["prompt"])["input_ids"] for row in texts(work)]
    batch = work["batch_size"]
    config = PPOConfig(
        **common(work, batch),
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
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        callbacks=[clock],
    )


def sampling_groups(work, clock, config_class, trainer_class):
    """GRPO and RLOO: one optimizer step on groups of 8. Scoring is all between the last token and the advantages."""
    mark_after(clock, trainer_class, "_generate", "_generate_and_score_completions")
    model = causal(work)
    config = config_class(
        **common(work, work["batch_size"]),
        max_steps=work["iterations"],
        num_generations=work["group"],
        max_completion_length=work["new_tokens"],
        beta=0.05,
        temperature=1.0,
        generation_kwargs={"eos_token_id": model.config.eos_token_id},
    )
    return trainer_class(
        model=model,
        args=config,
        reward_funcs=run_path(f"{work['folder']}/rewards.py")["share_of_vowels"],
        train_dataset=Dataset.from_list(texts(work)),
        processing_class=tokenizer(f"{work['folder']}/actor"),
        callbacks=[clock],
    )


def grpo(work, clock):
    from trl import GRPOConfig, GRPOTrainer

    return sampling_groups(work, clock, GRPOConfig, GRPOTrainer)


def rloo(work, clock):
    from trl import RLOOConfig, RLOOTrainer

    return sampling_groups(work, clock, RLOOConfig, RLOOTrainer)


def dpo(work, clock):
    """One optimizer step on pairs that share a prompt."""
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(
        **common(work, work["batch_size"]), max_steps=work["iterations"], max_length=work["length"], beta=0.1
    )
    return DPOTrainer(
        model=causal(work),
        ref_model=causal(work),
        args=config,
        train_dataset=Dataset.from_list(texts(work)),
        processing_class=tokenizer(f"{work['folder']}/actor"),
        callbacks=[clock],
    )


def sft(work, clock):
    """One optimizer step for each iteration, as for reward modelling."""
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        **common(work, work["batch_size"]), max_steps=work["iterations"], max_length=work["length"]
    )
    return SFTTrainer(
        model=causal(work),
        args=config,
        train_dataset=Dataset.from_list(texts(work)),
        processing_class=tokenizer(f"{work['folder']}/actor"),
        callbacks=[clock],
    )


def reward_model(work, clock):
    """Pairs that share a prompt."""
    from trl import RewardConfig, RewardTrainer

    config = RewardConfig(
        **common(work, work["batch_size"]),
        max_steps=work["iterations"],
        max_length=work["length"],
    )
    return RewardTrainer(
        model=scalar(work),
        args=config,
        train_dataset=Dataset.from_list(texts(work)),
        processing_class=tokenizer(f"{work['folder']}/reward"),
        callbacks=[clock],
    )


def main():
    work, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    clock = Clock()
    begin = {"ppo": ppo, "grpo": grpo, "rloo": rloo, "dpo": dpo, "sft": sft, "reward_model": reward_model}
    begin[work["algorithm"]](work, clock).train()
    out.write_text(json.dumps(clock.rows))


if __name__ == "__main__":
    main()
