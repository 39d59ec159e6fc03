"""Stop strings: which token completes one, by one look-up per token for a whole batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

BYTES = 256  # different ones


class StopStrings:
    """A finite automaton over tokens: how much of a stop string a text ends with (Aho and Corasick, CACM 1975).

    strings  none empty
    texts    of each token id in UTF-8; a token may hold part of a character, and text on both sides of a string

    A row's *state* is the number of the longest prefix of a string that its text ends with; 0 is the empty one.
    """

    def __init__(self, strings: Sequence[str], texts: Sequence[bytes]) -> None:
        after, completes = _automaton([string.encode() for string in strings])
        # Longest texts first: the tokens with a byte at a place are then the first ones.
        order = np.array(sorted(range(len(texts)), key=lambda token: -len(texts[token])), dtype=np.int64)
        lengths = np.array([len(texts[token]) for token in order], dtype=np.int64)
        states = np.repeat(np.arange(len(after), dtype=np.int32)[:, None], len(texts) + 1, axis=1)
        completed = np.zeros_like(states)
        for place in range(int(lengths.max(initial=0))):
            longer = order[: int((lengths > place).sum())]
            byte = np.array([texts[token][place] for token in longer], dtype=np.int64)
            here = states[:, longer]
            completed[:, longer] |= completes[here, byte]
            states[:, longer] = after[here, byte]
        self._table = torch.from_numpy(2 * states + completed)

    def to(self, device: torch.device) -> Tensor:
        """[states, tokens + 1] int32 on a device: twice the next state, plus 1 where a string was completed.

        The last column is for token ids that the tokenizer does not have, and which have no text.
        """
        return self._table.to(device)


def follow(table: Tensor, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The states of some rows after one token more each, and whether this token completed a stop string.

    table   as from `StopStrings.to`
    states, tokens  [n] int64
    Returns [n] int64 and [n] bool.
    """
    found = table[states, tokens.clamp(max=table.shape[1] - 1)].long()
    return found >> 1, (found & 1).bool()


def states_behind(table: Tensor, texts: Sequence[Tensor]) -> Tensor:
    """The states after some texts, all followed at the same time: [n] int64.

    table  as from `StopStrings.to`
    texts  the tokens of each, [L] int64; L may be 0
    """
    lengths = torch.tensor([len(text) for text in texts], device=table.device)
    states = torch.zeros_like(lengths)
    for number, tokens in enumerate(pad_sequence(list(texts)).unbind()):
        states = torch.where(number < lengths, follow(table, states, tokens)[0], states)
    return states


def _automaton(strings: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """([states, 256] int32 the state after a byte; [states, 256] int32, 1 where a string ends with it)."""
    prefixes = sorted(
        {string[:length] for string in strings for length in range(len(string) + 1)},
        key=lambda p: (len(p), p),
    )
    number = {prefix: state for state, prefix in enumerate(prefixes)}
    after = np.zeros((len(prefixes), BYTES), dtype=np.int32)
    completes = np.zeros_like(after)
    for state, prefix in enumerate(prefixes):
        for byte in range(BYTES):
            text = prefix + bytes([byte])
            completes[state, byte] = text.endswith(tuple(strings))
            after[state, byte] = next(
                number[text[start:]] for start in range(len(text) + 1) if text[start:] in number
            )
    return after, completes
