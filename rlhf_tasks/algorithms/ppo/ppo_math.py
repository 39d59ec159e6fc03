"""The mathematics of PPO's critic and of its adaptive KL coefficient: pure functions on packed tensors."""

import torch
from torch import Tensor


def adapted_kl_coef(kl_coef: float, kl: float, target: float, horizon: int, n_seqs: int) -> float:
    """The next KL coefficient by the adaptive controller of arXiv:1909.08593, section 2.2; once per iteration.

    kl, target  mean KL per sequence and its target, in nats
    horizon     sequences over which the coefficient reacts
    n_seqs      sequences of this iteration
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * n_seqs / horizon)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float, huber_delta: float | None = None
) -> tuple[Tensor, Tensor]:
    """Clipped value loss per token (Engstrom et al., arXiv:2005.12729, section 3, item 1).

    values, old_values, returns  [T]
    huber_delta  an error e costs e^2 / 2 up to |e| = delta and delta (|e| - delta / 2) above (Huber, 1964);
                 None: e^2 / 2 everywhere
    Returns (loss, clipped), both [T]; clipped is True where the clipped value has the larger error.
    """
    # Not old + clamp(values - old): its rounding would make values inside the bounds count as clipped.
    near = values.clamp(old_values - cliprange, old_values + cliprange)
    free, bounded = (values - returns).abs(), (near - returns).abs()
    error = torch.maximum(free, bounded)
    if huber_delta is None:
        return error.square() / 2, bounded > free
    linear = huber_delta * (error - huber_delta / 2)
    return torch.where(error <= huber_delta, error.square() / 2, linear), bounded > free


def shifted(stage_values: Tensor, position_ids: Tensor) -> Tensor:
    """The value of the state *before* each token: [T]; 0 at each sample's first token.

    stage_values  [T], the value of the state after each token
    position_ids  [T]
    """
    return torch.where(position_ids == 0, 0.0, stage_values.roll(1))
