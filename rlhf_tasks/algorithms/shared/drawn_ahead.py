"""How a graph samples ahead of its training: calls with a lead, and what the correction for it reads. Torch-free."""

from collections.abc import Sequence

from rlhf_tasks.algorithms.shared.policy_config import PolicyConfig
from rlhf_tasks.algorithms.shared.rollout_calls import KEPT, SEQUENCES
from rlhf_tasks.spec import ModelFunctionCall

DRAWN_BY = "drawn_by"
"""The key of the version of the actor that has drawn a sample."""

PROXIMAL = "proximal_logprobs"
"""The key of the log-probabilities under the actor before the train_step, the proximal policy of decoupled PPO."""


def drawn_ahead(calls: Sequence[ModelFunctionCall], config: PolicyConfig) -> list[ModelFunctionCall]:
    """The calls of a graph, with generation `config.staleness` iterations ahead.

    `actor_generate` records which version it has drawn with. Where tokens are weighted, `actor_inference` computes
    the log-probabilities under the proximal policy (arXiv:2110.00641, section 3; arXiv:2505.24298, section 5.2), and
    `actor_train` reads them. Without staleness the calls stay as they are.
    """
    if not config.staleness:
        return list(calls)
    found = list[ModelFunctionCall]()
    proximal = (PROXIMAL,) if config.corrects_staleness else ()
    for call in calls:
        if call.kind == "generate":
            drawn = (DRAWN_BY,) if call.name == "actor_generate" else ()
            lead = {"lead": config.staleness, "outputs": (*call.outputs, *drawn)}
            found.append(call.model_copy(update=lead))
        elif call.kind == "train_step" and call.role == "actor":
            if proximal:
                found.append(
                    ModelFunctionCall(
                        name="actor_inference",
                        role="actor",
                        kind="inference",
                        inputs=(*SEQUENCES, *(key for key in KEPT if key in call.inputs)),
                        outputs=proximal,
                        n_seqs=call.n_seqs,
                        group_size=call.group_size,
                        remap={PROXIMAL: "logprobs"},
                    )
                )
            found.append(call.model_copy(update={"inputs": (*call.inputs, DRAWN_BY, *proximal)}))
        else:
            found.append(call)
    return found
