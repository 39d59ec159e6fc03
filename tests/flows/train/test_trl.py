"""Three of TRL's own examples, written anew: only the imports and the name of the arguments differ."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefect_rlhf import ConfigError, DPOTrainer, GRPOTrainer, SFTTrainer, TrainingArguments
from prefect_rlhf.flows.run.run_folder import CONFIG, keep_config
from prefect_rlhf.rlhf_tasks.algorithms.configurations import load_config, resolve_paths
from prefect_rlhf.rlhf_tasks.user_code.agents.rollouts import function_at
from tests import tiny_rollout
from tests.flows.train.scripts import environment, files_in, run_script
from tests.tiny_reward import length_reward

ROWS = [{"prompt": "abc", "answer": "d"}, {"prompt": "ef", "answer": "g"}] * 8


class DataSet(list):
    """As `datasets.Dataset` looks from outside."""

    column_names = ("prompt", "answer")


def translated(trainer=GRPOTrainer, rows=ROWS, rewards=length_reward, **names):
    others = {name: names.pop(name) for name in ("peft_config", "eval_dataset", "ref_model") if name in names}
    if trainer is GRPOTrainer:
        others["reward_funcs"] = rewards
    return trainer(model="m", args=TrainingArguments(**names), train_dataset=rows, **others).config


def test_what_is_not_given_has_trls_default():
    config = translated()
    assert (config.batch_size, config.num_generations, config.total_iterations) == (8, 8, 48)  # 3 epochs
    assert (config.loss_type, config.sampling.max_completion_length, config.seed) == ("dapo", 512, 42)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.lr_scheduler_type) == (1e-6, "linear")
    assert optimizer.adam_betas == (0.9, 0.999)
    assert translated(SFTTrainer).optimizer.learning_rate == 2e-5
    assert translated(DPOTrainer).beta == 0.1


def test_names_mean_what_they_mean_there(tmp_path):
    config = translated(
        output_dir=f"{tmp_path}/mine", per_device_train_batch_size=4, gradient_accumulation_steps=4, bf16=True,
        num_generations=4, temperature=0.7, warmup_steps=5, reward_weights=[0.5], max_steps=10, num_iterations=2,
        logging_steps=1, report_to="none", save_steps=3, epsilon=0.1, use_vllm=False,
        peft_config=SimpleNamespace(r=8, lora_alpha=16, target_modules=["v_proj", "q_proj"], lora_dropout=0.0),
    )  # fmt: skip
    assert (config.output_dir, config.name) == (str(tmp_path), "mine")
    assert (config.batch_size, config.total_iterations, config.num_iterations) == (16, 5, 2)
    assert (config.sampling.temperature, config.optimizer.warmup_steps, config.dtype) == (0.7, 5, "bfloat16")
    assert (config.rewards[0].weight, config.epsilon, config.snapshot_every) == (0.5, 0.1, 3)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (8, 16, ("q_proj", "v_proj"))
    assert translated(rewards=[length_reward, "rm"], reward_weights=[1.0, 2.0]).models.reward == "rm"
    assert translated(DPOTrainer, ref_model="other").models.ref == "other"
    assert translated(rows=DataSet(ROWS), num_train_epochs=1).total_iterations == 16
    turns = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    assert not translated(SFTTrainer, rows=turns).completion_only_loss
    assert translated(SFTTrainer, eval_dataset=ROWS, eval_steps=2).evaluation.every == 2


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"num_generation": 4}, "num_generation: no setting of that name here, did you mean 'num_generations'?"),
        ({"steps_per_generation": 2}, "here it is num_mini_batches."),
        ({"use_vllm": True}, "use_vllm: no setting of that name here"),
        ({"reward_weights": [1, 2]}, "reward_weights has 2 numbers for 1 rewards. Give one for each."),
        ({"rewards": ["one", "two"]}, "reward_funcs names 2 reward models. Name one of them."),
        ({"rows": "org/name"}, "train_dataset org/name is no file here, so its rows cannot be counted."),
        ({"rows": None}, "train_dataset: required, but not given."),
        ({"trainer": DPOTrainer, "loss_type": ["sigmoid", "sft"]}, "loss_type: sigmoid, sft are several losses."),
        ({"num_train_epochs": "3"}, "num_train_epochs: expected a number above 0, found '3'."),
        ({"max_steps": "3"}, "max_steps: expected a whole number of at least -1, found '3'."),
        (
            {"per_device_train_batch_size": None},
            "per_device_train_batch_size: expected a whole number of at least 1, found None.",
        ),
        ({"rows": (row for row in ROWS)}, "train_dataset: rows are counted and read again, which a generator does"),
        ({"output_dir": "."}, "output_dir: expected a folder whose name has letters, digits"),
        ({"output_dir": "runs/my run"}, "begins with a letter or digit, found 'runs/my run'."),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_with_what_comes_closest(names, said):
    with pytest.raises(ConfigError) as refused:
        translated(**names)
    assert said in str(refused.value)


def test_objects_that_ranks_cannot_have_are_refused():
    for arguments, said in (
        ({"model": object()}, "so give the model's folder or id, found a object."),
        ({"processing_class": SimpleNamespace(name_or_path="other")}, "found that of other. Leave it out."),
        ({"callbacks": [1]}, "callbacks: a trainer of this project has no such argument."),
        (
            {"peft_config": SimpleNamespace(r=8, lora_alpha=16, lora_dropout=0.1)},
            "lora_dropout=0.1, and adapters here have r, lora_alpha and target_modules alone. Leave it out.",
        ),
        ({"peft_config": {"r": 8}}, "peft_config: expected peft's LoraConfig, found a dict."),
        ({"args": {}}, "args: give prefect_rlhf.TrainingArguments(...), found {}."),
    ):
        with pytest.raises(ConfigError) as refused:
            SFTTrainer(**{"model": "m", "train_dataset": ROWS, **arguments})
        assert said in str(refused.value)


def test_paths_are_taken_as_texts(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    config = GRPOTrainer(
        Path("m"), [length_reward, Path("rm")], TrainingArguments(tmp_path / "mine"), train_dataset=rows,
        eval_dataset=rows,
    ).config  # fmt: skip
    assert (config.models.actor, config.models.reward, config.name) == ("m", "rm", "mine")
    assert (config.data.train, config.total_iterations) == (str(rows), 48)
    assert DPOTrainer("m", Path("ref"), train_dataset=ROWS).config.models.ref == "ref"


def test_a_setting_of_peft_that_adapters_here_have_not_is_refused_by_its_name():
    peft = pytest.importorskip("peft")
    usual = translated(peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert (usual.lora.rank, usual.lora.targets) == (4, ("q_proj",))
    for name, value, said in (
        ("use_rslora", True, "use_rslora=True"),
        ("modules_to_save", ["lm_head"], "modules_to_save=['lm_head']"),
        ("bias", "all", "bias='all'"),
        ("rank_pattern", {"q_proj": 64}, "rank_pattern={'q_proj': 64}"),
        ("layers_to_transform", [0], "layers_to_transform=[0]"),
        ("exclude_modules", ["k_proj"], "exclude_modules={'k_proj'}"),
        ("init_lora_weights", False, "init_lora_weights=False"),
    ):
        with pytest.raises(ConfigError) as refused:
            translated(peft_config=peft.LoraConfig(**{name: value}))
        assert f"peft_config: {said}, and adapters here have r, lora_alpha and target_modules" in str(
            refused.value
        )


def test_a_rollout_func_is_an_agent_wherever_it_is_defined(tmp_path):
    config = GRPOTrainer("m", length_reward, train_dataset=ROWS, rollout_func=tiny_rollout.plays).config
    assert config.agent.rollout == "tests.tiny_rollout:plays"

    def plays(prompts, trainer):
        return tiny_rollout.plays(prompts, trainer)

    config = GRPOTrainer("m", length_reward, train_dataset=ROWS, rollout_func=plays).config
    config = resolve_paths(config, tmp_path)
    keep_config(tmp_path, config)
    kept = load_config(tmp_path / CONFIG).agent.rollout
    assert kept.startswith("functions/")
    assert function_at(f"{tmp_path}/{kept}").__name__ == "plays"


EXAMPLES = """
import json
from prefect_rlhf import DPOTrainer, GRPOTrainer, SFTTrainer, TrainingArguments

class Dataset(list):  # as of the package datasets, which need not be installed
    column_names = ("prompt",)

def num_unique_chars(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]

def main():
    texts = Dataset({"prompt": f"{i} and ", "completion": str(i + 1)} for i in range(16))
    sft = SFTTrainer(model="actor", train_dataset=texts, args=TrainingArguments(output_dir="tiny-SFT", max_steps=1))
    model = str(sft.train().model)

    pairs = Dataset({"prompt": f"{i} and ", "chosen": "yes", "rejected": "no"} for i in range(16))
    arguments = TrainingArguments(output_dir="tiny-DPO", num_train_epochs=1, per_device_train_batch_size=16)
    dpo = DPOTrainer(model=model, ref_model="actor", args=arguments, train_dataset=pairs)
    dpo.train()

    prompts = Dataset({"prompt": f"{i} and "} for i in range(16))
    arguments = TrainingArguments(
        output_dir="tiny-GRPO", max_completion_length=8, num_generations=4, max_steps=1, logging_steps=10
    )
    grpo = GRPOTrainer(model="actor", reward_funcs=num_unique_chars, args=arguments, train_dataset=prompts)
    grpo.train()
    grpo.save_model("saved")
    print(json.dumps([len(each.result.metrics) for each in (sft, dpo, grpo)]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_trls_three_quick_starts_run(prefect, tmp_path):
    ended = run_script(files_in(tmp_path), EXAMPLES, environment(prefect))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [1, 1, 1]
    assert (tmp_path / "saved" / "model.safetensors").exists()
    assert (tmp_path / "tiny-SFT" / "metrics.jsonl").exists()


PLAYS = """
import json
from prefect_rlhf import GRPOTrainer, TrainingArguments

def rollout(prompts, trainer):
    client, (text,), ids, rewards = trainer.vllm_generation.vllm_client, prompts, [], []
    for _ in range(2):
        drawn = client.generate([text], max_tokens=4)
        ids += drawn["completion_ids"][0]
        text += trainer.processing_class.decode(ids[-4:]) + "!"
    logprobs = [0.0] * len(ids)
    return {"prompt_ids": drawn["prompt_ids"], "completion_ids": [ids], "logprobs": [logprobs], "turns": [2]}

def turns_reward(completions, turns, **kwargs):
    return [float(each) for each in turns]

if __name__ == "__main__":
    prompts = [{"prompt": f"{i} and "} for i in range(16)]
    arguments = TrainingArguments(output_dir="mine", max_completion_length=16, num_generations=4, max_steps=1)
    grpo = GRPOTrainer("actor", turns_reward, args=arguments, train_dataset=prompts, rollout_func=rollout)
    (row,) = grpo.train().metrics
    print(json.dumps([row["rewards/turns_reward/mean"], row["agent/requests"]]))
"""


@pytest.mark.whole
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_script_with_a_rollout_func_runs(prefect, tmp_path):
    ended = run_script(files_in(tmp_path), PLAYS, environment(prefect))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [2.0, 2.0]
