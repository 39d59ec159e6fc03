"""What an environment answers becomes the text that the model's chat template writes there."""

import json
from pathlib import Path

import pytest

from flows.demo import byte_tokenizer
from rlhf_tasks.data.chat_template import TokenizerError
from rlhf_tasks.data.observations import Observations
from rlhf_tasks.data.tokenizer import Tokenizer

TURNS = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASKED = [{"role": "user", "content": "Guess."}]


def tokenizer_with(template: str, folder: Path) -> Tokenizer:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("ends", [True, False], ids=["behind an end of turn", "behind a turn that was cut"])
def test_behind_a_conversation_it_is_the_users_next_turn(tmp_path: Path, ends: bool):
    tokenizer = tokenizer_with(TURNS, tmp_path)
    (asked,) = tokenizer.render([(ASKED, True)])
    said = tokenizer.encode("4<eos>" if ends else "4")
    observed = Observations(tokenizer).ids("lower", ASKED, said[-1])
    conversation = [*ASKED, {"role": "assistant", "content": "4"}, {"role": "user", "content": "lower"}]
    (whole,) = tokenizer.render([(conversation, True)])
    assert [*tokenizer.encode(asked), *said, *observed] == tokenizer.encode(whole)


def test_behind_text_it_is_this_text_alone(tmp_path: Path):
    tokenizer = tokenizer_with(TURNS, tmp_path)
    assert Observations(tokenizer).ids("lower", "Guess.", 9) == tokenizer.encode("lower")


def test_a_template_that_leaves_out_a_users_later_turn_is_refused(tmp_path: Path):
    tokenizer = tokenizer_with("{{ messages[0].content }}{{ messages[1].content if messages[1:] }}", tmp_path)
    with pytest.raises(TokenizerError, match="does not write a user's turn behind the assistant's"):
        Observations(tokenizer).ids("lower", ASKED, 9)
