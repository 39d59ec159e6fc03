"""Samples come back as they were written, whatever characters models and rewards make."""

import torch

from prefect_rlhf.flows.run.summary import read_jsonl
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import Scored, write_samples
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import Packed, SampleBatch
from prefect_rlhf.rlhf_tasks.user_code.forms import Answers
from prefect_rlhf.rlhf_tasks.user_code.rewards import SAMPLES, read_samples

LINES = "a\u2028b\u0085c"  # what str.splitlines takes for the end of a line, and JSON does not
HALF = "\ud83d"  # of a surrogate pair, as where a reward cuts a text that it got from elsewhere


def test_lines_within_texts_and_halves_of_characters_in_what_a_reward_logs_come_back(tmp_path):
    answers = Answers([LINES], ["\u4e16\U0001f600"], [[1]], {}, [LINES])
    scored = Scored(
        torch.ones(1), {}, {"mine": {"cut": [HALF]}}, None, answers, {}, torch.ones(1, dtype=torch.bool)
    )
    batch = SampleBatch((0,), {"truncated": Packed(torch.tensor([False]), (1,))})
    path = tmp_path / SAMPLES / "0.jsonl"
    write_samples(path, batch, scored, 1)
    [sample] = read_samples(tmp_path, 1)
    assert (sample["prompt"], sample["completion"]) == (LINES, "\u4e16\U0001f600")
    assert sample["logged"] == {"mine/cut": HALF}
    assert read_jsonl(path) == [sample]
    assert "\u4e16\U0001f600" in path.read_text(encoding="utf-8"), "for the eye"
