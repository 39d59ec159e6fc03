"""What an environment answers, as the tokens that the model reads next."""

from collections.abc import Sequence
from typing import Any

from rlhf_tasks.data.chat_template import TokenizerError
from rlhf_tasks.data.tokenizer import Tokenizer

_ASKED, _SAID, _NEXT = (
    "c1q0",
    "c2a7",
    "c3q5",
)  # stand for turns, to see what the template writes around the last one


class Observations:
    """The tokens of observations behind a turn that the model has drawn.

    Behind a prompt that is text, an observation is this text alone. Behind a conversation it is the user's turn in
    the model's chat template, with all that the template writes from the end of the assistant's text on, up to where
    the next answer begins.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._around: tuple[str, str] | None = None

    def ids(self, text: str, prompt: Any, last: int) -> list[int]:
        """Token ids of an observation.

        prompt  of its row: text, or messages
        last    the token that the model has drawn last. Where it is the template's own end of a turn, that is not
                written again
        Raises TokenizerError where the tokenizer has no token for a part of the text, and where the chat template
        does not write the turns of a conversation one after another.
        """
        if isinstance(prompt, str):
            return self._tokenizer.encode(text)
        before, after = self._written()
        ids = self._tokenizer.encode(f"{before}{text}{after}")
        return ids[1:] if ids[:1] == [last] else ids

    def _written(self) -> tuple[str, str]:
        """What the template writes before and behind a user's turn that follows the assistant's text."""
        if self._around is None:
            asked: Sequence[dict[str, str]] = [
                {"role": "user", "content": _ASKED},
                {"role": "assistant", "content": _SAID},
                {"role": "user", "content": _NEXT},
            ]
            (text,) = self._tokenizer.render([(asked, True)])
            before, found, after = text.partition(_SAID)[2].partition(_NEXT)
            if not found:
                raise TokenizerError(
                    "the chat template does not write a user's turn behind the assistant's, so an environment cannot "
                    "answer. Mend the template, or give prompts as text."
                )
            self._around = (before, after)
        return self._around
