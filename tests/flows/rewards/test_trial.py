"""`config validate --rewards`: each reward is called once, on a real row, in a process of its own."""

import yaml

from prefect_rlhf.flows.cli import run_command


def validate(second_user, tmp_path, capsys, *rewards, data="trl", **changes):
    """(status, standard output, standard error)."""
    document = second_user.ppo(*rewards, data=data, output_dir=str(tmp_path / "runs"), **changes)
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(document))
    status = run_command(["config", "validate", str(tmp_path / "ppo.yaml"), "--rewards"])
    out, err = capsys.readouterr()
    return status, out, err


def test_each_reward_tells_what_it_gave_for_the_row(second_user, tmp_path, capsys):
    status, out, err = validate(second_user, tmp_path, capsys, "trl:length", "trl:for_sums", "trl:slow")
    assert status == 0, err
    row = f"{second_user.data['trl']}:1"
    assert f"reward length: 0.7 for {row} (" in out
    assert f"reward for_sums: no verdict for {row} (" in out
    assert f"reward slow: 1 for {row} (" in out
    assert "valid. 40 rows" in out
    assert not (tmp_path / "runs").exists()


def test_rows_of_verl_are_judged_too(second_user, tmp_path, capsys):
    status, out, _ = validate(second_user, tmp_path, capsys, "verl:loop_score", data="verl")
    assert status == 0
    assert "reward loop_score: 0 for" in out


def test_what_fails_is_told_in_a_sentence_each_with_the_line(second_user, tmp_path, capsys):
    rewards = ("broken:raises", "trl:length", "broken:nan")
    status, out, err = validate(second_user, tmp_path, capsys, *rewards)
    assert status == 2
    assert "reward length: 0.7 for" in out
    assert "sound" not in out
    assert err.count("\n") == 1
    assert "reward 'raises' raised KeyError: " in err
    assert f"{second_user.rewards}/broken.py:" in err
    assert "reward 'nan' returned nan: not a finite number." in err
    assert "Traceback" not in err


def test_a_run_without_rewards_has_none_to_call(call, document):
    document["type"] = "sft"
    for key in ("sampling", "rewards"):
        del document[key]
    status, _, err = call("config", "validate", "FILE", "--rewards")
    assert status == 2
    assert "has no" in err


ROOM = """
class Room:
    def __init__(self, says):
        self.says = says
    def reset(self, row, seed):
        self.row = row
    def step(self, text):
        assert self.row["prompt"].endswith(text)
        return self.says, 0.5, self.says == "over"
"""


def test_the_environment_answers_a_turn_too(second_user, tmp_path, capsys):
    (tmp_path / "rooms.py").write_text(ROOM)
    told = {}
    for says in ("more", "over", "long " * 99, 7):
        played = {"factory": f"{tmp_path}/rooms.py:Room", "kwargs": {"says": says}}
        status, out, err = validate(second_user, tmp_path, capsys, "trl:length", environment=played)
        told[says] = (status, next((line for line in out.splitlines() if "Room" in line), err))
        assert "reward length: 0.7 for" in out
    row = f"{second_user.data['trl']}:1"
    assert (told["more"][0], told["over"][0]) == (0, 0), told
    assert told["more"][1].startswith(f"environment Room: reward 0.5, 'more' for {row} (")
    assert told["over"][1].startswith(f"environment Room: reward 0.5, over for {row} (")
    assert told[7][0] == told["long " * 99][0] == 2
    assert "Room: step returned the observation 7: not a text." in told[7][1]
    assert "Room: an observation has" in told["long " * 99][1]
