"""The second user's folder is sound in every shape of its rows, and none of it is the first one's."""

import pytest

from flows.run.prepare import prepare
from rlhf_tasks.algorithms.configurations import make_config
from rlhf_tasks.data.tokenizer import Tokenizer
from tests.tiny_runs import byte_tokenizer


@pytest.mark.parametrize(
    ("data", "reward"), [("trl", "trl:exact"), ("verl", "verl:compute_score"), ("chat", "openrlhf:as_list")]
)
def test_rows_of_every_shape_are_sound(second_user, tmp_path, data, reward):
    document = second_user.ppo(reward, data=data, output_dir=str(tmp_path))
    prepared = prepare(make_config(document))
    assert len(prepared.rows) == 40


def test_the_tokenizer_is_its_own(second_user):
    tokenizer = Tokenizer.from_folder(second_user.model)
    ids = tokenizer.encode("What is 3 + 4?", special_tokens=True)
    assert tokenizer.decode(ids) == "What is 3 + 4?"
    assert len(tokenizer.stop_ids) == 2
    assert tokenizer.size < byte_tokenizer().get_vocab_size()
    assert len(ids) < len("What is 3 + 4?")
