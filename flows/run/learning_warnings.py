"""What a run's metrics say of a run that cannot learn: decided from rows alone. Loads neither Prefect nor torch."""

from collections.abc import Callable, Mapping, Sequence

Row = Mapping[str, float | None]

IN_A_ROW = 5
"""Iterations that must agree: one batch may be all right or all wrong by chance, five with new prompts hardly."""
KL_PER_TOKEN = 0.5
"""Nats: a model that samples at temperature 1 has about 1 nat of entropy per token, so its text has then left the
reference's."""
KL_GROWTH = (
    3.0  # of that of the first iteration: a reference that was far away from the start does not explode
)


def learning_warnings(first: Row, newest: Sequence[Row]) -> dict[str, str]:
    """What is wrong -> a sentence with what to look at, by the first row of a run and its newest ones, in order."""
    newest = newest[-IN_A_ROW:]
    if len(newest) < IN_A_ROW:
        return {}
    found = {what: rule(first, newest) for what, rule in _RULES.items()}
    return {what: said for what, said in found.items() if said}


def _nothing_differs(_first: Row, newest: Sequence[Row]) -> str:
    rewards, spreads = _all(newest, "reward"), _all(newest, "reward_std")
    remedy = (
        "Look at the answers in samples/ and at what the reward says of them; where it is right, easier or harder "
        "prompts, or more answers to each, make a difference."
    )
    if rewards and len(set(rewards)) == 1 and spreads and not any(spreads):
        return (
            f"every response of {IN_A_ROW} iterations has the reward {rewards[0]:.3f}, so nothing can be learned "
            f"from it. {remedy}"
        )
    equal = _all(newest, "frac_reward_zero_std")
    if equal and min(equal) == 1:
        return (
            f"in {IN_A_ROW} iterations all responses to a prompt have equal rewards (frac_reward_zero_std 1), so "
            f"nothing can be learned from them. {remedy}"
        )
    return ""


def _none_ends(_first: Row, newest: Sequence[Row]) -> str:
    truncated, lengths = _all(newest, "completions/clipped_ratio"), _all(newest, "completions/mean_length")
    if not truncated or min(truncated) < 1:
        return ""
    return (
        f"no response of {IN_A_ROW} iterations has an end token: all are cut at {max(lengths, default=0):.0f} "
        "tokens. Raise sampling.max_completion_length, see whether the chat template ends the model's answers, or "
        "name strings in sampling.stop."
    )


def _kl_explodes(first: Row, newest: Sequence[Row]) -> str:
    kl = [_kl_per_token(row) for row in newest]
    least = max(KL_PER_TOKEN, KL_GROWTH * (_kl_per_token(first) or 0.0))
    if any(value is None or value < least for value in kl):
        return ""
    return (
        f"the KL divergence from the reference is {kl[-1]:.2g} nats a token, above {KL_PER_TOKEN:g} for {IN_A_ROW} "
        "iterations: the model has left the reference. Lower optimizer.learning_rate, or raise kl_coef or beta, and "
        "look at the answers in samples/."
    )


_RULES: Mapping[str, Callable[[Row, Sequence[Row]], str]] = {
    "equal rewards": _nothing_differs,
    "truncated": _none_ends,
    "kl": _kl_explodes,
}


def _all(rows: Sequence[Row], name: str) -> list[float]:
    """A metric of all rows; nothing where one of them lacks it."""
    values = [value for row in rows if (value := row.get(name)) is not None]
    return values if len(values) == len(rows) else []


def _kl_per_token(row: Row) -> float | None:
    kl, length = row.get("kl"), row.get("completions/mean_length")
    return None if kl is None or not length else kl / length
