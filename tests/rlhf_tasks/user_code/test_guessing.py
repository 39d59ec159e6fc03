"""The guessing game."""

import itertools

import pytest

from prefect_rlhf.rlhf_tasks.user_code.builtin_environments import GuessingGame


def played(guesses, number=None, seed=0, **kwargs):
    """What each guess of a game is answered with, until it is over."""
    game = GuessingGame(**kwargs)
    game.reset({"prompt": "p"} | ({} if number is None else {"number": number}), seed)
    answers = []
    for guess in guesses:
        answers.append(game.step(guess))
        if answers[-1][2]:
            break
    return answers


def test_a_hint_says_in_which_direction_the_number_is():
    assert played(["4", "2", "3"], number=3) == [
        (" lower ", 0, False),
        (" higher ", 0, False),
        ("right", 1, True),
    ]
    assert played(["I think 3?"], number=3) == [("right", 1, True)]
    assert played(["none"], number=3) == [(" number ", 0, False)]


def test_the_last_wrong_guess_ends_the_game_without_a_reward():
    assert played(["7", "7", "7"], number=3)[-1] == (" lower ", 0, True)


def test_who_reads_the_hints_always_wins_and_who_does_not_wins_three_of_seven():
    def reading(number):
        low, high, hints = 1, 7, []
        for _ in range(3):
            middle = (low + high) // 2
            hints.append(str(middle))
            low, high = (middle + 1, high) if middle < number else (low, middle - 1)
        return played(hints, number=number)[-1][1]

    assert [reading(number) for number in range(1, 8)] == [1.0] * 7
    blind = [
        sum(played(map(str, guesses), number=number)[-1][1] for number in range(1, 8))
        for guesses in itertools.product(range(1, 8), repeat=3)
    ]
    assert max(blind) == 3


def test_without_the_rows_number_the_seed_draws_it():
    def drawn(seed):
        return next(n for n in range(1, 8) if played([str(n)], seed=seed)[-1][1])

    numbers = [drawn(seed) for seed in range(60)]
    assert numbers == [drawn(seed) for seed in range(60)]
    assert set(numbers) == set(range(1, 8))


@pytest.mark.parametrize("number", [0, 8, "4", True])
def test_a_rows_number_that_is_none_of_the_games_is_refused(number):
    with pytest.raises(ValueError, match=f"the row's number {number!r} must be from 1 to 7"):
        played([], number=number)


def test_settings_that_are_no_game_are_refused():
    with pytest.raises(ValueError, match="guesses=0 must be a whole number of at least 1"):
        GuessingGame(guesses=0)
