"""What an agent was answered, as sequences of tokens, and which of them are its episode's sample
(docs/adr/0043-agents.md)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.user_code.agents.chat_api import RAW, Asked

_TURN = "c2a7q9"  # stands for a turn, to see what the template writes after it


@dataclass(frozen=True)
class Chain:
    """What an agent was answered, with all that it had read before.

    request  that was answered
    said     the answer, with special tokens and without: an agent may know either
    tail     text of the tokens that ended it, which the agent may write again or not
    data     key of `generate` -> its tensor, of all tokens
    line     numbers of the answers that it holds; the last one is its own
    drawn    number of tokens that were drawn
    cut      whether the answer ended by length
    is_over  whether an end token has ended it: nothing can follow in the same turn of a conversation
    """

    request: Asked
    said: tuple[str, str]
    tail: str
    data: Mapping[str, Tensor]
    line: tuple[int, ...]
    drawn: int
    cut: bool
    is_over: bool

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.data["input_ids"])

    def rest(
        self, request: Asked, render: Callable[[Sequence[Mapping[str, Any]]], str], ends: Sequence[str] = ()
    ) -> str | None:
        """The text that a request adds after the answer; None where it does not continue it.

        render  messages -> text in which the assistant's turn is open
        ends    texts of the tokens that end a turn
        """
        before = self.request.messages
        if self.request.ids:  # only tokens continue tokens
            return None
        if before is None or request.messages is None:
            added = self._added(request.text, self.request.text)
            return added if before is request.messages else None
        place = len(before)
        goes_on = request.messages[:place] == before and request.tools == self.request.tools
        if not goes_on or [each["role"] for each in request.messages[place : place + 1]] != ["assistant"]:
            return None
        message = request.messages[place]
        calls = message.get("tool_calls", [])
        said = message.get(RAW) if calls else message["content"]
        added = None if said is None else self._added(said)
        if added is None or (added and self.is_over):
            return None
        # The template may write a turn that is over otherwise than one that it opens: only what follows it counts.
        # Where it has calls, they are written, since templates look for them before the answers of tools.
        turn = {**message, "content": "" if calls else _TURN}
        if calls:
            last = {**calls[-1]["function"], "arguments": {"value": _TURN}}
            turn["tool_calls"] = [*calls[:-1], {**calls[-1], "function": last}]
        _, is_written, after = render([*before, turn, *request.messages[place + 1 :]]).partition(_TURN)
        if calls:
            places = [after.find(end) for end in ends if end in after]
            after = after[min(places, default=0) :]
            is_written = is_written and bool(places)
        if not is_written:
            return None
        return added + (after if added else after.removeprefix(self.tail))

    def _added(self, text: str, before: str = "") -> str | None:
        """What a text says after another and the answer, which may be nothing in a turn of a conversation. Any text
        begins with an empty answer: then it must continue with the tail."""
        for said in self.said:
            if text.startswith(before + said) and (text != before or not before):
                after = text[len(before) + len(said) :]
                added = after.removeprefix(self.tail)
                if said or not after or added != after:
                    return added
        return None


def sequences(chains: Mapping[int, Chain], most: int) -> list[tuple[Chain, int]]:
    """The chains that are the sample, in the order of their own answers; of each how many of its first tokens are
    those of a chain before it. Where not all have room, those with the most drawn tokens do, the last first.

    chains  of an episode, by the numbers of their own answers
    most    tokens of a sample
    """
    chosen, covered = list[Chain](), set[int]()
    for chain in sorted(chains.values(), key=lambda chain: (chain.drawn, chain.line), reverse=True):
        if chain.line[-1] not in covered and chain.length <= most:
            most -= chain.length
            chosen.append(chain)
            covered.update(chain.line)
    sequences, covered = list[tuple[Chain, int]](), set[int]()
    for chain in sorted(chosen, key=lambda chain: chain.line[-1]):
        last = max(covered.intersection(chain.line), default=None)
        sequences.append((chain, 0 if last is None else chains[last].length))
        covered.update(chain.line)
    return sequences


def joined(*parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The data of sequences one after the other."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[-1]}


def read_up_to(start: int, data: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The data of a sequence, as if the policy had only read its first tokens."""
    read = followed({}, data["input_ids"][:start].tolist(), dtype)
    counts = data.get("kept_counts")
    kept = 0 if counts is None else int(counts[:start].abs().sum())
    after = {key: part[kept if key == "kept_tokens" else start :] for key, part in data.items()}
    return joined(read, after)


def followed(before: Mapping[str, Tensor], ids: Sequence[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """The data of some tokens, and of others after them that the policy has only read."""
    none = torch.zeros(len(ids), dtype=dtype)
    read = {
        "input_ids": torch.tensor(ids, dtype=torch.int64),
        "response_mask": none.bool(),
        "old_logprobs": none,
        "kept_counts": none.int(),
        "kept_tokens": none[:0].int(),
    }
    return {key: torch.cat([before[key], part]) if key in before else part for key, part in read.items()}
