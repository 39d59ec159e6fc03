"""Roles with adapters on a rank: what they share, what is saved, and the folders that are exported."""

import re

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
from prefect_rlhf.rlhf_tasks.checkpoint.commits import step_folder
from prefect_rlhf.rlhf_tasks.checkpoint.snapshots import restore
from prefect_rlhf.rlhf_tasks.parallel.model.stage import Stage
from prefect_rlhf.rlhf_tasks.rank.export import export_commit
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.adapter_folders import commit_of, engines_of, write_adapter
from tests.ppo_calls import PPO_CALLS
from tests.rlhf_tasks.algorithms.one_rank import world_of_one
from tests.tiny_models import packed, tokens
from tests.tiny_runs import ppo_config, write_model, write_prompts

ALONE = {"plan": dict.fromkeys(PPO_CALLS, "0"), "cluster": {"devices_per_host": 1}}
LORA = {"rank": 4, "alpha": 6.0}


def stages_of(config: PPOConfig, plan: ExecutionPlan) -> dict[str, Stage]:
    engines = engines_of(config, plan)
    return {role: engines.get(role, where.placements[0]).stage for role, where in plan.roles.items()}


def stored_at(stage: Stage) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in stage.named_slices().items()}


@pytest.mark.parametrize("ref_comes_first", [False, True])
def test_a_reference_is_the_actor_without_its_adapters_and_no_second_copy(
    tmp_path, monkeypatch, ref_comes_first: bool
):
    """So are critic and reward model, except for the value head, which trains."""
    config = ppo_config(tmp_path, lora=LORA, **ALONE)
    if ref_comes_first:
        roles = dict(reversed(config.roles().items()))
        monkeypatch.setattr(PPOConfig, "roles", lambda self: roles)
    with world_of_one():
        stages = stages_of(config, prepare(config).plan)
    assert stored_at(stages["actor"]) == stored_at(stages["ref"])
    critic, reward = stored_at(stages["critic"]), stored_at(stages["reward"])
    assert {name for name in critic if critic[name] != reward[name]} == {"score.weight"}
    named = {role: {name for name, _ in stage.named_parameters()} for role, stage in stages.items()}
    assert all("lora_" in name for name in named["actor"] - named["ref"])
    micro = packed(tokens(5, 3))
    with torch.no_grad():
        for parameter in stages["actor"].trained_slices().values():
            parameter.fill_(0.1)
        assert not torch.equal(*(stages[role](micro.input_ids, micro) for role in ("actor", "ref")))


def test_an_offloaded_reference_has_weights_of_its_own(tmp_path):
    plan = {**ALONE["plan"], "ref_inference": "0 offload"}
    config = ppo_config(tmp_path, lora=LORA, **{**ALONE, "plan": plan})
    with world_of_one():
        engines, plan = engines_of(config, prepare(config).plan), prepare(config).plan
        (place,) = plan.roles["ref"].placements
        engines.onload("ref", place)
        ours, theirs = engines.get("ref", place).stage, engines.get("actor", place).stage
        assert not set(stored_at(ours).values()) & set(stored_at(theirs).values())
        engines.offload("ref", place)
        assert all(parameter.numel() for parameter in theirs.parameters())
        engines.close()


def test_roles_that_train_as_a_whole_share_nothing(tmp_path):
    config = ppo_config(tmp_path, **ALONE)
    with world_of_one():
        stages = stages_of(config, prepare(config).plan)
    assert len({place for stage in stages.values() for place in stored_at(stage).values()}) == sum(
        len(stored_at(stage)) for stage in stages.values()
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def committed(request, tmp_path_factory):
    """(configuration, folder of a commit, stages) of a run whose adapters are committed."""
    folder = tmp_path_factory.mktemp("adapters")
    config = ppo_config(folder, lora=LORA, dtype=request.param, **ALONE)
    plan = prepare(config).plan
    with world_of_one():
        engines = commit_of(config, plan, folder / "run")
        stages = {role: engines.get(role, plan.roles[role].placements[0]).stage for role in plan.roles}
    return config, step_folder(folder / "run", 1), stages


def test_a_commit_holds_the_adapters_alone(committed):
    _, commit, stages = committed
    assert {path.name.partition(".")[0] for path in commit.glob("*.safetensors")} == {"actor", "critic"}, (
        "no frozen role"
    )
    for role, more in (("actor", 0), ("critic", 1)):
        (path,) = commit.glob(f"{role}.*.safetensors")
        stored = load_file(path)
        assert len(stored) == 3 * (2 * 7 * 2 + more)
        trained = sum(p.numel() for p in stages[role].trained_slices().values())
        assert sum(tensor.nbytes for tensor in stored.values()) == 3 * 4 * trained
        assert trained * 3 < sum(p.numel() for p in stages[role].parameters())


def test_other_adapters_do_not_fit_a_commit(committed):
    config, commit, _ = committed
    other = config.model_copy(update={"lora": config.lora.model_copy(update={"rank": 5})})
    with world_of_one():
        engine = dict(engines_of(other, prepare(other).plan).changing())["actor"]
        with pytest.raises(ValueError, match=r"the saved 'actor' has another shape: lora adapters of rank 4"):
            restore("actor", engine, commit.parent, 1)


def outputs(stage: Stage, sequences: list[Tensor]) -> Tensor:
    micro = packed(sequences)
    with torch.no_grad():
        return stage(micro.input_ids, micro).float()


def theirs(model, sequences: list[Tensor], head: str) -> Tensor:
    with torch.no_grad():
        if head == "lm":
            return torch.cat([model(s[None]).logits[0] for s in sequences]).float()
        hidden = [model.model(s[None]).last_hidden_state for s in sequences]
        return torch.cat([model.score(h)[0, :, 0] for h in hidden]).float()


CLASSES = {"lm": AutoModelForCausalLM, "scalar": AutoModelForSequenceClassification}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(("role", "head"), [("actor", "lm"), ("critic", "scalar")])
@pytest.mark.parametrize("merged", [False, True], ids=["adapter", "merged"])
def test_an_exported_folder_gives_what_the_rank_computes(committed, tmp_path, role, head, merged):
    """peft loads adapters onto the model that they name, transformers the merged model."""
    config, commit, stages = committed
    export_commit(commit, config, role, tmp_path / "out", merged)
    kind, source = CLASSES[head], config.roles()[role].folder
    assert (tmp_path / "out" / "tokenizer.json").exists()
    if merged:
        model = kind.from_pretrained(tmp_path / "out", dtype=config.dtype)
    else:
        adapters = peft.PeftConfig.from_pretrained(tmp_path / "out")
        assert adapters.base_model_name_or_path == source
        base = kind.from_pretrained(source, dtype=config.dtype, num_labels=1)
        model = peft.PeftModel.from_pretrained(base, tmp_path / "out").base_model.model
    sequences = tokens(5, 9, vocab=200)
    ours, other = outputs(stages[role], sequences), theirs(model.eval(), sequences, head)
    tolerance = 1e-5 if config.dtype == "float32" else 0.06
    assert (ours - other).abs().max() < tolerance * other.abs().max()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_on_top_of_an_adapter_are_exported_as_a_whole_model_whatever_is_asked(tmp_path):
    write_adapter(tmp_path / "sft", write_model(tmp_path / "base"))
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "actor").mkdir()  # nothing is to be made
    reward = write_model(tmp_path / "reward", head="scalar", seed=2)
    config = ppo_config(
        tmp_path, models={"actor": str(tmp_path / "sft"), "reward": str(reward)}, lora=LORA, **ALONE
    )
    plan = prepare(config).plan
    with world_of_one():
        engines = commit_of(config, plan, tmp_path / "run")
        stage = engines.get("actor", plan.roles["actor"].placements[0]).stage
    export_commit(step_folder(tmp_path / "run", 1), config, "actor", tmp_path / "out", merged=False)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32").eval()
    sequences = tokens(5, 9, vocab=200)
    ours, other = outputs(stage, sequences), theirs(model, sequences, "lm")
    assert (ours - other).abs().max() < 1e-5 * other.abs().max()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(("role", "head"), [("actor", "lm"), ("critic", "scalar")])
def test_gradients_are_those_of_peft(committed, tmp_path, role, head):
    """Of the mean square of all outputs. Split over ranks they are those of one rank (tests of the engine)."""
    config, commit, stages = committed
    export_commit(commit, config, role, tmp_path / "out")
    base = CLASSES[head].from_pretrained(config.roles()[role].folder, dtype=config.dtype, num_labels=1)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out", is_trainable=True)
    sequences = tokens(5, 9, vocab=200)
    with torch.enable_grad():
        inner = model.base_model.model
        if head == "lm":
            other = torch.cat([inner(s[None]).logits[0] for s in sequences])
        else:
            other = torch.cat([inner.score(inner.model(s[None]).last_hidden_state)[0] for s in sequences])
        other.float().square().mean().backward()
        micro, trained = packed(sequences), stages[role].trained_slices()
        own = {name: p for name, p in stages[role].named_parameters() if name in trained}
        loss = stages[role](micro.input_ids, micro).float().square().mean()
        ours = dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
    found = {
        re.sub(r"^base_model\.model\.|\.modules_to_save|\.default", "", name): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    assert ours.keys() == found.keys()
    tolerance = 1e-4 if config.dtype == "float32" else 0.1
    for name, gradient in ours.items():
        assert (gradient - found[name]).abs().max() <= tolerance * found[name].abs().max(), name


def test_the_configuration_says_what_is_exported(committed, tmp_path):
    config, commit, _ = committed
    export_commit(commit, config, "actor", tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").glob("*.safetensors")} == {
        "adapter_model.safetensors"
    }
    wanted = config.lora.model_copy(update={"export": "merged"})
    export_commit(commit, config.model_copy(update={"lora": wanted}), "actor", tmp_path / "merged")
    assert {path.name for path in (tmp_path / "merged").glob("*.safetensors")} == {"model.safetensors"}


def test_the_commit_says_in_which_dtype(committed, tmp_path):
    """A configuration of `dtype: auto` would mean that of the machine which exports."""
    config, commit, _ = committed
    export_commit(commit, config.model_copy(update={"dtype": "auto"}), "actor", tmp_path / "out", merged=True)
    tensors = load_file(tmp_path / "out" / "model.safetensors").values()
    assert {str(tensor.dtype) for tensor in tensors} == {f"torch.{config.dtype}"}
