"""The gated delta rule against its definition, and where sequences begin and end."""

import pytest
import torch
from torch import Tensor

from prefect_rlhf.rlhf_tasks.parallel.layout.work import DELTA_CHUNK
from prefect_rlhf.rlhf_tasks.parallel.model.delta_rule import gated_delta_rule

HEADS, GROUP, KEY, VALUE = 2, 3, 5, 4


def inputs(tokens: int) -> list[Tensor]:
    """query, key, value, decay and beta of so many tokens."""
    torch.manual_seed(tokens)
    values = HEADS * GROUP
    query, key = torch.randn(2, tokens, HEADS, KEY, dtype=torch.float64)
    value = torch.randn(tokens, values, VALUE, dtype=torch.float64)
    decay, beta = -torch.rand(tokens, values, dtype=torch.float64), torch.rand(tokens, values).double()
    return [query, key, value, decay, beta]


def token_by_token(rows: list[Tensor], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition, over one sequence."""
    query, key, value, decay, beta = rows
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state = torch.zeros(HEADS * GROUP, KEY, VALUE).double() if state is None else state
    outputs = []
    for t in range(len(value)):
        new = []
        for head in range(HEADS * GROUP):
            k, q = key[t, head // GROUP], query[t, head // GROUP] * KEY**-0.5
            faded = state[head] * decay[t, head].exp()
            new.append(faded + beta[t, head] * torch.outer(k, value[t, head] - faded.T @ k))
            outputs.append(new[head].T @ q)
        state = torch.stack(new)
    return torch.stack(outputs).view(len(value), HEADS * GROUP, VALUE), state


@pytest.mark.parametrize("lengths", [(7,), (1, 1, 1), (3, 70, 1, 9, 64), (5, 130)])
def test_packed_sequences_give_what_the_definition_gives_for_each_alone(lengths: tuple[int, ...]):
    rows = inputs(sum(lengths))
    output, states = gated_delta_rule(*rows, lengths)
    of_each = zip(*(x.split(lengths) for x in rows), output.split(lengths), states, strict=True)
    for *alone, ours, state in of_each:
        expected, last = token_by_token(alone)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(state, last)


@pytest.mark.parametrize("cut", [1, 6, DELTA_CHUNK, 69])
def test_a_sequence_goes_on_from_its_state(cut: int):
    rows = inputs(70)
    whole, last = gated_delta_rule(*rows, (70,))
    first, state = gated_delta_rule(*(x[:cut] for x in rows), (cut,))
    second, end = gated_delta_rule(*(x[cut:] for x in rows), (70 - cut,), state)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    torch.testing.assert_close(end, last)


def test_a_step_of_many_sequences_is_the_definition():
    rows = inputs(4)
    states = torch.randn(4, HEADS * GROUP, KEY, VALUE).double()
    output, after = gated_delta_rule(*rows, (1,) * 4, states)
    for t in range(4):
        expected, last = token_by_token([x[t : t + 1] for x in rows], states[t])
        torch.testing.assert_close(output[t : t + 1], expected)
        torch.testing.assert_close(after[t], last)


def test_gradients_are_those_of_the_definition():
    rows = [x.requires_grad_() for x in inputs(12)]
    token_by_token([x[:3] for x in rows])[0].square().sum().backward()
    token_by_token([x[3:] for x in rows])[0].square().sum().backward()
    expected = [x.grad for x in rows]
    for x in rows:
        x.grad = None
    gated_delta_rule(*rows, (3, 9))[0].square().sum().backward()
    torch.testing.assert_close([x.grad for x in rows], expected)


def test_16_bits_keep_a_float32_state():
    rows = [x.bfloat16() for x in inputs(9)]
    output, state = gated_delta_rule(*rows, (9,))
    assert (output.dtype, state.dtype) == (torch.bfloat16, torch.float32)
