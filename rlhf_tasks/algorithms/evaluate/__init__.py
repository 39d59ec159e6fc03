"""Evaluation of a frozen model: a rollout whose result is the mean of its scores."""

from dataclasses import replace

from rlhf_tasks.algorithms.evaluate.config import EvaluateConfig
from rlhf_tasks.algorithms.rollout import ALGORITHM as ROLLOUT

ALGORITHM = replace(ROLLOUT, config=EvaluateConfig)
