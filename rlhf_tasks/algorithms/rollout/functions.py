"""The calls of a rollout."""

from prefect_rlhf.rlhf_tasks.algorithms.shared.context import CallContext, CallOutput
from prefect_rlhf.rlhf_tasks.algorithms.shared.generation import actor_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.judging import judge_generate
from prefect_rlhf.rlhf_tasks.algorithms.shared.scores import score_and_write
from prefect_rlhf.rlhf_tasks.parallel.batch.samples import SampleBatch
from prefect_rlhf.rlhf_tasks.parallel.train.engine import Engine

__all__ = ["actor_generate", "judge_generate", "reward_inference"]


def reward_inference(engine: Engine, batch: SampleBatch, context: CallContext) -> CallOutput:
    """Compute `scores`, and write all of this head's samples into the run folder. Metrics: see `reward_metrics`."""
    return score_and_write(engine, batch, context, len(batch))
