"""Games of TextArena, played by the package itself."""

import pytest

from prefect_rlhf.rlhf_tasks.user_code.episodes import Episode

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
NAME = "textarena:GuessTheNumber-v0"


@pytest.fixture(autouse=True)
def package(installed):
    return installed("textarena")


def found(game, row, sample=0):
    """The turns of who halves what is left, and their answers."""
    low, high, turns = 1, 20, []
    while True:
        turns.append(f"[{(low + high) // 2}]")
        answer = game.play(row, *turns, sample=sample)[-1]
        if answer[2]:
            return turns, answer
        middle = (low + high) // 2
        low, high = (middle + 1, high) if "higher" in answer[0] else (low, middle - 1)


def test_a_rows_seed_is_the_games_and_only_what_is_new_is_observed(table, rows):
    first, second = rows(NAME, 2)
    assert [first["start"], second["start"]] == [0, 1]
    (message,) = first["prompt"]
    assert message["role"] == "user"
    assert "You are playing Guess The Number" in message["content"]
    game = table(NAME)
    turns, answer = found(game, first)
    assert answer == ("", 1.0, True)
    hints = [observation for observation, *_ in game.play(first, *turns)[:-1]]
    assert set(hints) <= {"The target number is higher.", "The target number is lower."}
    assert found(table(NAME), first) == (turns, answer), "the same game in another process"
    assert len({tuple(found(game, row)[0]) for row in rows(NAME, 8)}) > 1


def test_an_invalid_move_is_answered_and_a_second_one_ends_the_game(table, rows):
    (row,) = rows(NAME, 1)
    one, two = table(NAME).play(row, "[50]", "[50]")
    assert "You attempted an invalid move" in one[0]
    assert one[1:] == (0.0, False)
    assert two[2]


def test_games_beside_each_other_draw_their_own_numbers(table, rows):
    """2048 draws a tile after each move: from the game's state, whichever other game has moved between."""
    name, moves = "textarena:2048-v0", ("[up]", "[left]", "[up]", "[left]")
    row, other = rows(name, 2)
    alone, beside = table(name).play(row, *moves), []
    game = table(name)
    for number in range(1, 5):
        answers = game.process.answers(
            [Episode(sample, each, 7, moves[:number]) for sample, each in ((1, other), (0, row))]
        )
        beside.append(tuple(answers[1]))
    assert beside == alone


def test_a_game_of_the_users_is_played_by_its_file(table, rows, tmp_path):
    (tmp_path / "games.py").write_text(
        "from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv\n\n\n"
        "def small():\n    return GuessTheNumberEnv(min_number=4, max_number=4)\n"
    )
    (row,) = rows(f"textarena:{tmp_path}/games.py:small", 1)
    assert table(f"textarena:{tmp_path}/games.py:small").play(row, "[4]") == [("", 1.0, True)]
