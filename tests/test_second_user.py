"""The second user's folder is sound in every shape of its rows, and none of it is the first one's."""

import pytest

from prefect_rlhf.flows.run.prepare import prepare
from prefect_rlhf.rlhf_tasks.algorithms.configurations import make_config
from prefect_rlhf.rlhf_tasks.data.tokenizer import Tokenizer
from tests.tiny_runs import byte_tokenizer


@pytest.mark.parametrize(
    ("data", "reward"), [("trl", "trl:exact"), ("verl", "verl:compute_score"), ("chat", "openrlhf:as_list")]
)
def test_rows_of_every_shape_are_sound(second_user, tmp_path, data, reward):
    document = second_user.ppo(reward, data=data, output_dir=str(tmp_path))
    prepared = prepare(make_config(document))
    assert len(prepared.rows) == 40


@pytest.mark.parametrize(
    ("kind", "data", "rows"),
    [("sft", "turns", 40), ("reward_model", "pairs", 40), ("dpo", "pairs", 40), ("kto", "pairs", 80)],
)
def test_conversations_and_pairs_are_sound(second_user, tmp_path, kind, data, rows):
    options = {"assistant_only_loss": True} if kind == "sft" else {}
    prepared = prepare(make_config(second_user.supervised(kind, data, output_dir=str(tmp_path), **options)))
    assert len(prepared.rows) == rows
    tokenizer, first = Tokenizer.from_folder(second_user.model), prepared.rows.values(0)

    def shown(ids: str, mask: str) -> str:
        return tokenizer.decode(first[ids][first[mask]], special_tokens=True)

    if kind == "sft":
        assert shown("input_ids", "response_mask") == "30<|im_end|> \n 3<|im_end|> \n"
    elif kind == "dpo":
        assert shown("chosen_ids", "chosen_mask") == "3<|im_end|> \n"
        assert shown("rejected_ids", "rejected_mask") == "30<|im_end|> \n"
    elif kind == "reward_model":
        assert [prepared.rows.values(i)["margin"].tolist() for i in range(3)] == [[0.0], [1.0], [2.0]]


def test_the_tokenizer_is_its_own(second_user):
    tokenizer = Tokenizer.from_folder(second_user.model)
    ids = tokenizer.encode("What is 3 + 4?", special_tokens=True)
    assert tokenizer.decode(ids) == "What is 3 + 4?"
    assert len(tokenizer.stop_ids) == 2
    assert tokenizer.size < byte_tokenizer().get_vocab_size()
    assert len(ids) < len("What is 3 + 4?")
