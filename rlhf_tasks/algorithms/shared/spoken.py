"""The text of tokens that were drawn, as an agent is told it: whole, or piece by piece while others are drawn."""

from collections.abc import Sequence
from itertools import takewhile

from prefect_rlhf.rlhf_tasks.data.tokenizer import NO_CHARACTER, Tokenizer
from prefect_rlhf.rlhf_tasks.user_code.agents.streams import begun


def until(text: str, before: str, strings: Sequence[str]) -> str:
    """A text up to the first of some strings that its last token has completed: min_new_tokens lets others be.

    before  the text without that token
    """
    same = takewhile(lambda both: both[0] == both[1], zip(text, before, strict=False))
    since = len(list(same)) + 1  # the last token may have completed a character
    places = (text.find(string, max(since - len(string), 0)) for string in strings)
    return text[: min((place for place in places if place >= 0), default=len(text))]


def after(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int], special_tokens: bool) -> str:
    """The text that tokens add to those before them: some tokenizers leave out a space where a text begins."""
    begun = tokenizer.decode(before, special_tokens=special_tokens)
    whole = tokenizer.decode([*before, *ids], special_tokens=special_tokens)
    return (
        whole[len(begun) :]
        if whole.startswith(begun)
        else tokenizer.decode(ids, special_tokens=special_tokens)
    )


class Spoken:
    """The text of a turn while it is drawn, as far as no later token can change it.

    A part of a character is held back, as is what may be the beginning of a string that ends the turn.

    before          tokens that the turn follows
    strings         that may end it
    special_tokens  whether their texts are a part of it
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int], strings: Sequence[str], special_tokens: bool
    ) -> None:
        self._tokenizer, self._strings, self._special = tokenizer, strings, special_tokens
        self._before, self._open = (
            list(before),
            list[int](),
        )  # settled tokens, as few as are needed; those after
        self._held = ""

    def add(self, ids: Sequence[int]) -> str:
        """The text that further tokens settle."""
        self._open += ids
        text = after(self._tokenizer, self._before, self._open, self._special)
        # A token without a text, as a special one is, may stand between bytes.
        last = self._tokenizer.decode(ids[-1:], special_tokens=self._special)
        if not (text and last) or text.endswith(NO_CHARACTER) or self._tokenizer.is_byte(ids[-1]):
            return ""
        # Some text is to stand before a token: at the beginning some tokenizers leave out a space.
        self._before, self._open = self._open, []
        text = self._held + text
        free = len(text) - begun(text, self._strings)
        self._held = text[free:]
        return text[:free]
