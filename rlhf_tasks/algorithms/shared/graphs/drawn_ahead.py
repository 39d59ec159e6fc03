"""How a graph learns from what older versions have drawn: ahead of its training, or in segments. Torch-free."""

from collections.abc import Sequence

from rlhf_tasks.algorithms.shared.graphs.rollout_calls import KEPT, SEQUENCES
from rlhf_tasks.algorithms.shared.policy_config import PolicyConfig
from rlhf_tasks.spec import ModelFunctionCall
from rlhf_tasks.system.reading import ConfigError

DRAWN_BY = "drawn_by"
"""The key of the version of the actor that has drawn each token; -1 on the prompt."""

PROXIMAL = "proximal_logprobs"
"""The key of the log-probabilities under the actor before the train_step, the proximal policy of decoupled PPO, where
the train_step takes several optimizer steps."""

NUMBER = "number"
"""The key of the global id of the sample that ended in a place of the batch (docs/adr/0020-segments.md)."""

COLUMNS = "columns_of_number"
"""The key of the columns of that sample's row."""


def from_older_versions(calls: Sequence[ModelFunctionCall], config: PolicyConfig) -> list[ModelFunctionCall]:
    """The calls of a graph whose samples are drawn ahead, or in segments.

    Generation runs `config.staleness` iterations ahead, and records which version has drawn each token. Where
    these are weighted, and the train_step takes several optimizer steps, `actor_inference` computes the
    log-probabilities under the proximal policy (arXiv:2110.00641, section 3; arXiv:2505.24298, section 5.2), and
    `actor_train` reads them. Without staleness and segments the calls stay as they are.
    Raises ConfigError where a graph cannot be drawn in segments.
    """
    if not config.learns_from_older:
        return list(calls)
    segment = config.sampling.segment_tokens
    found = list[ModelFunctionCall]()
    proximal = (PROXIMAL,) if config.infers_proximal else ()
    for call in calls:
        if call.kind == "generate":
            drawn = (DRAWN_BY,) if call.name == "actor_generate" else ()
            changed = {"lead": config.staleness, "outputs": (*call.outputs, *drawn)}
            found.append(call.model_copy(update=changed))
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
    return found if segment is None else in_segments(found, segment)


def in_segments(calls: Sequence[ModelFunctionCall], segment_tokens: int) -> list[ModelFunctionCall]:
    """The calls of a graph whose generation draws at most so many tokens of a sequence at a time.

    Only generation knows which sample ends in which place, so calls that read the columns of its row get them
    from there, with its number.
    Raises ConfigError for a graph that generates twice: it would compare the answers to different prompts.
    """
    generating = [call.name for call in calls if call.kind == "generate"]
    if len(generating) > 1:
        raise ConfigError(
            f"sampling.segment_tokens={segment_tokens}: the calls {' and '.join(generating)} answer the same "
            "prompts, but in segments they would end at different times. Leave it out, or choose an algorithm that "
            "generates once, such as grpo or ppo."
        )
    found = list[ModelFunctionCall]()
    for call in calls:
        changed: dict[str, object] = {}
        if call.kind == "generate":
            changed = {
                "segment_tokens": segment_tokens,
                "inputs": (*call.inputs, "columns"),
                "outputs": (*call.outputs, NUMBER, COLUMNS),
            }
        elif "columns" in call.inputs:
            inputs = (COLUMNS if key == "columns" else key for key in call.inputs)
            changed = {"inputs": (*inputs, NUMBER), "remap": {**call.remap, COLUMNS: "columns"}}
        found.append(call.model_copy(update=changed))
    return found
