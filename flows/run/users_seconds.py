"""How long the user's own code may take in each node of a plan, for which its deadline must allow."""

from rlhf_tasks.algorithms.held_out import evaluation_of, rows_at_once
from rlhf_tasks.config.base import RunConfig, Scores
from rlhf_tasks.spec import CallNode, EvaluateNode, ExecutionPlan
from rlhf_tasks.user_code.environments import longest_play_s
from rlhf_tasks.user_code.rewards import longest_s


def users_seconds(config: RunConfig, plan: ExecutionPlan, held_out_rows: int) -> dict[str, float]:
    """Node that calls Python rewards, services or environments -> seconds that these may take there, until they are
    late.

    held_out_rows  rows that an evaluation answers; it judges them batch by batch
    A call judges, or answers, one batch on each head, all at the same time.
    """
    answers = evaluation_of(config)
    found: dict[str, float] = {}
    play_s = longest_play_s(config) if isinstance(config, Scores) else 0.0
    for node in plan.nodes:
        match node:
            case CallNode(call=call):
                gives = {call.remap.get(key, key) for key in call.outputs}
                if isinstance(config, Scores) and config.scoring_rewards and "scores" in gives:
                    found[node.name] = longest_s(config)
                elif play_s and call.kind == "generate":
                    found[node.name] = play_s
            case EvaluateNode() if answers is not None:
                found[node.name] = -(-held_out_rows // rows_at_once(config)) * (
                    (longest_s(answers) if answers.rewards else 0.0) + play_s
                )
            case _:
                pass
    return found
