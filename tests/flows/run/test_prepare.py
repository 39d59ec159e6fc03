"""What is checked and decided before a run: models, data, plan."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from prefect_rlhf.flows.demo import write_model_folder
from prefect_rlhf.flows.run import planning, prepare
from prefect_rlhf.flows.run.planning import hardware_of, problem_of, profile_folder
from prefect_rlhf.flows.run.prepare import make_plan
from prefect_rlhf.flows.run.run_identity import model_digests
from prefect_rlhf.planner.plan.build import PlanError
from prefect_rlhf.planner.pricing.devices import Gpu, device_of, preset
from prefect_rlhf.planner.pricing.figures import store
from prefect_rlhf.planner.search.search import find_plan
from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError, RunConfig, make_config
from prefect_rlhf.rlhf_tasks.checkpoint.changes import PLAN, keep_first_plan, log_change
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import ParallelStrategy
from prefect_rlhf.rlhf_tasks.spec import ExecutionPlan
from tests.adapter_folders import write_adapter
from tests.flows.checked_files import LLAMA, model_folder, refused, without
from tests.flows.plan_documents import LLAMA as INLINE
from tests.flows.plan_documents import measured, ppo
from tests.ppo_calls import PPO_CALLS
from tests.tiny_runs import learning_config, ppo_config, write_model


def auto(**changes) -> RunConfig:
    return make_config(ppo(plan="auto", planning={"prompt_tokens": 16, "time_limit_s": 2}, **changes))


def plan_of(config: RunConfig, folder: Path | None = None) -> ExecutionPlan:
    return make_plan(config, problem_of(config, hardware_of(config)), folder)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run folder with its plan."""
    (tmp_path / PLAN).write_text(plan_of(make_config(ppo())).model_dump_json())
    return tmp_path


def test_auto_is_the_search_within_its_time_and_seed(monkeypatch):
    asked = {}

    def find(problem, mode, time_limit_s, seed, called_off):
        assert not called_off()
        asked.update(mode=mode, time_limit_s=time_limit_s, seed=seed)
        return find_plan(problem, "heuristic", 60.0)

    monkeypatch.setattr(planning, "find_plan", find)
    config = auto(seed=7)
    plan = plan_of(config)
    assert asked == {"mode": "search", "time_limit_s": 2.0, "seed": 7}
    assert {node.name for node in plan.nodes if node.kind == "call"} == set(PPO_CALLS)


def test_ctrl_c_in_a_search_ends_the_run_that_it_is_for(monkeypatch):
    def find(problem, mode, time_limit_s, seed, called_off):
        os.kill(os.getpid(), signal.SIGINT)
        while not called_off():
            time.sleep(0.01)
        return find_plan(problem, "heuristic", 60.0)

    monkeypatch.setattr(planning, "find_plan", find)
    with pytest.raises(KeyboardInterrupt):
        plan_of(auto(seed=7))


def test_auto_goes_by_a_cached_profile(tmp_path):
    """By a CPU slot's figures the calls are best on two; measured were links so slow that all stay on one."""
    planning = {"prompt_tokens": 16, "time_limit_s": 60, "device": "cpu-slot"}
    config = make_config(ppo(plan="auto", planning=planning, output_dir=str(tmp_path)))

    def devices() -> set[int]:
        return {d for node in plan_of(config).nodes if node.kind == "call" for d in node.devices}

    assert devices() == {0, 1}
    found = measured()
    slow = tuple(e.model_copy(update={"seconds": 300 * e.seconds}) for e in found.exchanges)
    store(found.model_copy(update={"exchanges": slow}), profile_folder(config))
    assert len(devices()) == 1


def test_a_run_priced_far_beyond_its_profile_or_without_a_correction_is_warned_about(tmp_path):
    folder = model_folder(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n')
    document = ppo(
        models={"actor": str(folder), "reward": str(folder)},
        data={"train": str(tmp_path / "prompts.jsonl")},
        output_dir=str(tmp_path),
        planning={"prompt_tokens": 16, "device": "cpu-slot"},
    )
    few, many = make_config(document), make_config({**document, "batch_size": 1024})
    (uncorrected,) = prepare.prepare(
        make_config({**document, "staleness": 1, "correction": {"kind": "none"}})
    ).warnings
    assert uncorrected.startswith("staleness=1 with correction.kind=none")
    assert prepare.prepare(many).warnings == (), "nothing is measured"
    store(measured(ModelShape.from_config(LLAMA)), profile_folder(many))
    assert prepare.prepare(few).warnings == ()
    (warning,) = prepare.prepare(many).warnings
    assert warning.startswith("The measured profile of cpu-slot ends at ")
    assert "rows that decode together; actor_generate is priced at " in warning


LAYER_OF_70B = {  # as in Llama 2 70B, which has 80 such layers
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def large(layers: int, **changes) -> RunConfig:
    """PPO of an actor with so many layers, and a small reward model and critic, on 2 hosts of 8 GPUs."""
    actor, reward = ({**LAYER_OF_70B, "num_hidden_layers": n} for n in (layers, 4))
    fields = {
        "models": {"actor": actor, "reward": reward},
        "dtype": "bfloat16",
        "batch_size": 64,
        "cluster": {"n_hosts": 2, "devices_per_host": 8},
        "planning": {"prompt_tokens": 16, "device": "h200-sxm"},
    }
    return make_config(ppo(**{**fields, **changes}))


@pytest.mark.parametrize(
    ("layers", "strategy"), [(4, (16, 1, 1)), (20, (16, 1, 1)), (40, (4, 4, 1)), (80, (1, 8, 2))]
)
def test_the_heuristic_gives_a_role_as_many_devices_as_its_memory_needs(layers, strategy):
    """tp grows inside a host; what does not fit a host is cut in stages over hosts."""
    calls = {
        node.name: node.placement.strategy for node in plan_of(large(layers)).nodes if node.kind == "call"
    }
    assert calls["actor_train"] == ParallelStrategy(*strategy)
    assert calls["reward_inference"] == ParallelStrategy(16, 1, 1)


@pytest.mark.parametrize("plan", ["heuristic", dict.fromkeys(PPO_CALLS, "hosts 0 d2 t4")])
def test_a_run_that_does_not_fit_is_refused_with_bytes_and_remedy(plan):
    with pytest.raises(PlanError) as refused:
        plan_of(large(140, plan=plan))
    for part in ("Device 0 (", ") lacks ", " bytes", "actor: parameters", "would lower it"):
        assert part in str(refused.value)
    assert "planning.device" not in str(refused.value)


@pytest.mark.parametrize("plan", ["heuristic", dict.fromkeys(PPO_CALLS, "0")])
def test_where_no_device_is_named_the_refusal_says_which_one_was_assumed(plan, monkeypatch):
    monkeypatch.setattr(
        "prefect_rlhf.flows.run.planning.device_here",
        lambda slots: preset("cpu-slot").model_copy(update={"memory_bytes": 10**5}),
    )
    with pytest.raises(
        PlanError, match=r"lacks .* assumes this machine's devices, cpu-slot; planning\.device names others"
    ):
        plan_of(make_config(ppo(plan=plan)))


def test_an_unknown_gpu_is_planned_by_its_own_figures_with_a_warning(monkeypatch):
    gpu = Gpu("NVIDIA X1", 10**11, (9, 0), 100, 2e9, 3e12)
    monkeypatch.setattr("prefect_rlhf.flows.run.planning.device_here", lambda slots: device_of(gpu))
    config = make_config(ppo())
    problem = problem_of(config, hardware_of(config))
    assert problem.model.classes.profile(0).name == "x1"
    (warning,) = problem.warnings
    assert warning.startswith("x1, this machine's GPU, has no data sheet here")


@pytest.mark.parametrize(
    ("by_hand", "message"),
    [
        (
            dict.fromkeys(PPO_CALLS, "hosts 0-1 p16"),
            "Call 'actor_generate': pp=16 exceeds the model's 4 layers",
        ),
        (
            dict.fromkeys(PPO_CALLS, "hosts 0-1 c16"),
            "Call 'actor_generate': cp=16 divides the tokens of a sequence",
        ),
    ],
    ids=["layers", "generation"],
)
def test_a_strategy_that_does_not_suit_its_model_is_refused_with_its_call(by_hand, message):
    with pytest.raises(PlanError, match=message):
        plan_of(large(4, plan=by_hand))


def test_a_resumed_run_keeps_its_plan_and_plans_nothing(kept, monkeypatch):
    def find(*arguments, **options):
        raise AssertionError("planned anew")

    monkeypatch.setattr(planning, "find_plan", find)
    config = auto()
    plan = plan_of(config, kept)
    assert json.loads(plan.model_dump_json()) == json.loads((kept / PLAN).read_text())


def test_a_plan_by_hand_is_not_taken_from_the_folder(kept):
    config = make_config(ppo(plan=dict.fromkeys(PPO_CALLS, "1")))
    plan = plan_of(config, kept)
    assert all(node.devices == (1,) for node in plan.nodes)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"batch_size": 16}, ("plan of another graph", "8 sequences", "Remove it")),
        ({"type": "grpo", "num_generations": 4}, ("plan of another graph", "critic_train", "Remove it")),
        (
            {"sync_ref_model": True, "ref_model_sync_steps": 9},
            ("plan of another graph", "8 sequences", "Remove it"),
        ),
        ({"staleness": 1, "correction": {"kind": "none"}}, ("plan of another graph", "Remove it")),
        ({"cluster": {"devices_per_host": 4}}, ("a plan for 2 devices", "the cluster is 1x4", "Remove it")),
    ],
)
def test_a_kept_plan_of_another_run_is_refused(kept, change, parts):
    config = auto(**change)
    with pytest.raises(ConfigError) as refused:
        plan_of(config, kept)
    for part in parts:
        assert part in str(refused.value)


def test_a_run_without_its_first_plan_has_no_later_ones(kept):
    config = auto()
    problem, larger = problem_of(config, hardware_of(config)), auto(cluster={"devices_per_host": 4})
    log_change(kept, 3, plan_of(make_config(ppo())))
    (change,) = prepare._later_plans(config, problem, kept)
    assert change.iteration == 3
    (kept / PLAN).unlink()
    assert prepare._later_plans(config, problem, kept) == ()
    keep_first_plan(kept, plan_of(config, kept), ())
    assert prepare._later_plans(config, problem, kept) == ()
    log_change(kept, 3, plan_of(larger))
    with pytest.raises(
        ConfigError, match=rf"plan-2.json is a plan for 4 devices, .*Remove {kept / PLAN}, and the run is"
    ):
        prepare._later_plans(config, problem, kept)


def test_a_kept_plan_that_cannot_be_read_is_refused(kept):
    (kept / PLAN).write_text("{")
    config = auto()
    with pytest.raises(ConfigError, match="not an execution plan"):
        plan_of(config, kept)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({}, "models.actor is an inline config, which has no weights")],
)
def test_what_can_only_be_planned_does_not_run(change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        prepare.prepare(make_config(ppo(**change)))


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (None, "actor' has neither model.safetensors nor model.safetensors.index.json"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, "files that are not there: two.safetensors"),
    ],
)
def test_missing_weights_are_named_before_anything_starts(tmp_path: Path, index, sentence: str):
    write_model_folder(tmp_path / "actor")
    if index:
        (tmp_path / "actor" / "one.safetensors").touch()
        text = json.dumps({"weight_map": index})
        (tmp_path / "actor" / "model.safetensors.index.json").write_text(text)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "ab>", "completion": "ba"}) + "\n")
    document = {
        "type": "sft",
        "models": {"actor": str(tmp_path / "actor")},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "batch_size": 1,
        "total_iterations": 1,
    }
    with pytest.raises(ConfigError, match=sentence):
        prepare.prepare(make_config(document))
    drawn = make_config({**document, "random_init": True})
    assert prepare.prepare(drawn).iterations == 1
    with pytest.raises(ConfigError, match="but random_init=true begins with none"):
        make_config({**document, "random_init": True, "lora": {}})


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"model_type": "bert"}, ("model", "bert")),
        ({"model_type": "falcon"}, ("falcon", "query_key_value", "cannot be split")),
        ({"auto_map": {"AutoModel": "mine.Model"}}, ("auto_map",)),
        ({"model_type": "new"}, ("untested family 'new'", "Run prefect-rlhf doctor")),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("rope_type 'dynamic'", "yarn")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantised weights", "Save it unquantised")),
        ({"vocab_size": 100}, ("257 tokens", "100")),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(call, document, tmp_path, config, parts):
    document["models"] = {"actor": str(model_folder(tmp_path / "other", **config))}
    refused(call, *parts)


@pytest.mark.parametrize(
    ("lora", "parts"),
    [
        (
            {"targets": ["q_proj", "c_attn"]},
            ("lora.targets", "'c_attn'", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ),
        ({"rank": 17}, ("lora.rank=17", "down_proj, [16, 24]", "at most 16")),
        ({"rank": 17, "targets": ["lm_head"]}, ("'lm_head'",)),
    ],
)
def test_adapters_that_a_model_cannot_have_are_refused(call, document, lora, parts):
    document["lora"] = lora
    refused(call, *parts)


def test_a_model_folder_with_a_link_out_of_it_is_refused_before_the_run(tmp_path: Path):
    config = ppo_config(tmp_path)
    (tmp_path / "key").write_text("my key")
    (tmp_path / "actor" / "chat_template.jinja").symlink_to(tmp_path / "key")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is a link to .*key, outside of it"):
        prepare.prepare(config)


def test_an_adapter_that_describes_nothing_is_refused(call, document, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    document["models"]["actor"] = str(tmp_path / "adapter")
    refused(call, "adapter_config.json: peft_type is None, not LORA", "merge_and_unload")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_a_run_that_begins_from_an_adapter_reads_its_bases_tokenizer_and_exports_a_whole_model(tmp_path):
    base, adapter = write_model(tmp_path / "base"), tmp_path / "adapter"
    write_adapter(adapter, base)
    assert not (adapter / "tokenizer.json").exists()
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    config = make_config(
        {
            "type": "sft",
            "models": {"actor": str(adapter)},
            "data": {"train": str(tmp_path / "rows.jsonl")},
            "output_dir": str(tmp_path / "runs"),
            "total_iterations": 1,
            "batch_size": 1,
            "lora": {"rank": 2},
        }
    )
    prepared = prepare.prepare(config)
    assert not prepared.config.exports_adapters
    [warning] = [said for said in prepared.warnings if said.startswith("lora.export:")]
    assert "peft loads no adapter of an adapter, so the run exports the whole model, merged." in warning
    before = model_digests(config)
    assert before.keys() == {str(adapter), str(base)}
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, base / "model.safetensors")
    assert model_digests(config)[str(base)] != before[str(base)]


def test_a_reference_of_another_architecture_cannot_follow():
    ref = {**INLINE, "num_hidden_layers": 3}
    models = {"actor": INLINE, "ref": ref, "reward": INLINE}
    config = make_config(ppo(models=models, sync_ref_model=True, ref_model_sync_steps=9))
    with pytest.raises(
        ConfigError, match=r"'ref' and 'actor' cannot be blended, they differ: layers 3 and 2"
    ):
        problem_of(config, hardware_of(config))


def test_the_disk_needs_room_for_what_is_kept_and_two_snapshots_in_the_making(document):
    def commits(**more):
        return prepare.prepare(make_config({**document, **more})).disk.commits

    assert commits(total_iterations=50, keep_last=3) == 5
    assert commits(total_iterations=1, keep_last=3) == 2, "step 0 and step 1"


def test_the_disk_needs_room_for_a_reference_that_follows(document):
    frozen, following = (
        prepare.prepare(make_config({**document, **more})).disk
        for more in ({}, {"sync_ref_model": True, "ref_model_sync_steps": 1})
    )
    weights = frozen.export_bytes  # of the actor, in float32 as master weights are
    assert following == frozen._replace(commit_bytes=frozen.commit_bytes + weights)


def test_the_disk_needs_room_for_adapters_alone(document):
    whole, adapters, merged = (
        prepare.prepare(make_config({**document, **more})).disk
        for more in ({}, {"lora": {"rank": 1}}, {"lora": {"rank": 1, "export": "merged"}})
    )
    assert adapters.commit_bytes < whole.commit_bytes / 4
    assert adapters.export_bytes < whole.export_bytes / 4
    assert merged == adapters._replace(export_bytes=whole.export_bytes)


def test_a_model_folder_that_is_not_there_is_refused(call, document, tmp_path):
    document["models"] = {"actor": str(tmp_path / "nowhere")}
    refused(call, "role 'actor'", str(tmp_path / "nowhere"), "is not there")
    (tmp_path / "nowhere").mkdir()
    refused(call, str(tmp_path / "nowhere"), "config.json")


def test_a_reward_model_without_its_head_is_refused(call, document, tmp_path):
    document["models"]["reward"] = str(model_folder(tmp_path / "reward"))
    assert call("config", "validate", "FILE")[0] == 0
    without(tmp_path / "reward", "score.weight")
    refused(call, "/reward' has no score.weight", "trained reward model")
    del document["models"]["reward"]
    without(tmp_path / "model", "score.weight")
    status, _, err = call("config", "validate", "FILE")
    assert status == 0, f"a critic may begin as a language model: {err}"


def test_weights_that_are_not_the_models_are_refused(call, document, tmp_path):
    weights = tmp_path / "model" / "model.safetensors"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    refused(call, "mlp.gate_proj.weight has shape [24, 16]; config.json says [32, 16]")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    os.truncate(weights, weights.stat().st_size - 4)
    refused(call, "model.safetensors is cut off")
    without_norm = model_folder(tmp_path / "other")
    without(without_norm, "model.norm.weight")
    document["models"]["actor"] = str(without_norm)
    refused(call, "/other' lacks model.norm.weight")
    with_bias = model_folder(tmp_path / "biased", attention_bias=False)
    stored = load_file(with_bias / "model.safetensors")
    save_file(
        {**stored, "model.layers.1.self_attn.q_proj.bias": np.zeros(16, np.float32)},
        with_bias / "model.safetensors",
    )
    document["models"]["actor"] = str(with_bias)
    refused(call, "/biased' has 'model.layers.1.self_attn.q_proj.bias' (and 0 more tensors), which the model")


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ("", ("prompts.jsonl: has no rows",)),
        ('{"prompt": "a"}\nnonsense\n', ("prompts.jsonl:2: not valid JSON",)),
        ('{"prompt": "a"}\n\n{"question": "a"}\n', ("prompts.jsonl:3: has no column 'prompt'", "question")),
        (
            '{"prompt": "%s"}\n' % ("a" * 41),
            ("prompts.jsonl:1: has 41 tokens and an answer up to 8", "holds 48"),
        ),
    ],
)
def test_faulty_data_is_refused_with_file_and_line(call, tmp_path, rows, parts):
    (tmp_path / "prompts.jsonl").write_text(rows)
    refused(call, *parts)


def test_the_shortest_context_of_all_models_counts(call, document, tmp_path):
    document["models"]["reward"] = str(model_folder(tmp_path / "reward", max_position_embeddings=24))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "%s"}\n' % ("a" * 17))
    refused(call, "prompts.jsonl:2: has 17 tokens and an answer up to 8", "/reward) holds 24")


def test_a_prompt_that_just_fits_is_accepted(call, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "%s"}\n' % ("a" * 40))
    assert call("config", "validate", "FILE")[0] == 0


def test_a_missing_data_file_is_refused(call, tmp_path):
    (tmp_path / "prompts.jsonl").unlink()
    refused(call, "prompts.jsonl: no such file")


@pytest.mark.parametrize("key", ["data", "evaluation"])
def test_rows_in_a_file_s_configuration_are_refused_with_where_to_write_them(call, document, key):
    rows = [{"prompt": "abc"}, {"prompt": "de"}]
    document[key] = {"train": rows} if key == "data" else {"data": rows}
    remedy = "Write them to a JSONL file, one row a line, and name that file."
    refused(call, "2 rows of a list stand in the configuration itself", remedy)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    config = learning_config(tmp_path, "distillation")
    assert prepare.prepare(config).plan.algorithm == "distillation"
    file = tmp_path / "frozen" / "tokenizer.json"
    written = json.loads(file.read_text())
    written["model"]["vocab"]["a"], written["model"]["vocab"]["b"] = (
        written["model"]["vocab"][letter] for letter in "ba"
    )
    file.write_text(json.dumps(written))
    with pytest.raises(ConfigError) as caught:
        prepare.prepare(config)
    assert str(caught.value).startswith(
        f"{file}: differs from {tmp_path / 'actor' / 'tokenizer.json'}: the token"
    )
    assert str(caught.value).endswith("All models of a run must share the actor's tokenizer.")


def test_a_stop_id_that_the_tokenizer_lacks_is_refused(call, document):
    size = Tokenizer.from_file(f"{document['models']['actor']}/tokenizer.json").get_vocab_size()
    document["sampling"] = {"max_completion_length": 8, "stop": [3, size]}
    refused(call, f"sampling.stop has {size}", f"{size} tokens, from 0. Name ids of its tokens.")


def test_an_end_token_without_an_embedding_is_refused_where_answers_get_one(tmp_path):
    config = learning_config(tmp_path, "dpo")
    (tmp_path / "actor" / "tokenizer_config.json").write_text("{}")
    (tmp_path / "actor" / "generation_config.json").write_text('{"eos_token_id": 260}')
    with pytest.raises(ConfigError, match=r"has the id 260, a model has embeddings for 260. .* eos_token_id"):
        prepare.prepare(config)


def test_a_teacher_may_know_more_tokens(tmp_path):
    config = learning_config(tmp_path, "distillation")
    file = str(tmp_path / "frozen" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save(file)
    assert prepare.prepare(config).plan.algorithm == "distillation"
