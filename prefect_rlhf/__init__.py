"""The one import name of prefect-rlhf: `prefect_rlhf.flows`, `.planner`, `.rlhf_tasks`, `.blocks`, `.deployments`.

In a checkout they are links to the top-level folders; a wheel has the folders themselves. So a project of yours may
have a `flows` folder of its own (docs/adr/0027). The names below are for scripts and notebooks; each is loaded when
it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_rlhf.flows.train import TrainResult, train
    from prefect_rlhf.flows.trl import DPOTrainer, GRPOTrainer, SFTTrainer, TrainingArguments
    from prefect_rlhf.rlhf_tasks.algorithms.configurations import ConfigError
    from prefect_rlhf.rlhf_tasks.algorithms.distillation import DistillationConfig
    from prefect_rlhf.rlhf_tasks.algorithms.dpo import DPOConfig
    from prefect_rlhf.rlhf_tasks.algorithms.evaluate import EvaluateConfig
    from prefect_rlhf.rlhf_tasks.algorithms.expert_iteration import ExpertIterationConfig
    from prefect_rlhf.rlhf_tasks.algorithms.grpo import GRPOConfig
    from prefect_rlhf.rlhf_tasks.algorithms.kto import KTOConfig
    from prefect_rlhf.rlhf_tasks.algorithms.ppo import PPOConfig
    from prefect_rlhf.rlhf_tasks.algorithms.reinforce_pp import ReinforcePPConfig
    from prefect_rlhf.rlhf_tasks.algorithms.remax import ReMaxConfig
    from prefect_rlhf.rlhf_tasks.algorithms.reward_model import RewardModelConfig
    from prefect_rlhf.rlhf_tasks.algorithms.rloo import RLOOConfig
    from prefect_rlhf.rlhf_tasks.algorithms.rollout import RolloutConfig
    from prefect_rlhf.rlhf_tasks.algorithms.sft import SFTConfig

_ALGORITHMS = "prefect_rlhf.rlhf_tasks.algorithms"
_PLACES = {
    "train": "prefect_rlhf.flows.train",
    "TrainResult": "prefect_rlhf.flows.train",
    "DPOTrainer": "prefect_rlhf.flows.trl",
    "GRPOTrainer": "prefect_rlhf.flows.trl",
    "SFTTrainer": "prefect_rlhf.flows.trl",
    "TrainingArguments": "prefect_rlhf.flows.trl",
    "ConfigError": f"{_ALGORITHMS}.configurations",
    "DPOConfig": f"{_ALGORITHMS}.dpo",
    "DistillationConfig": f"{_ALGORITHMS}.distillation",
    "EvaluateConfig": f"{_ALGORITHMS}.evaluate",
    "ExpertIterationConfig": f"{_ALGORITHMS}.expert_iteration",
    "GRPOConfig": f"{_ALGORITHMS}.grpo",
    "KTOConfig": f"{_ALGORITHMS}.kto",
    "PPOConfig": f"{_ALGORITHMS}.ppo",
    "RLOOConfig": f"{_ALGORITHMS}.rloo",
    "ReMaxConfig": f"{_ALGORITHMS}.remax",
    "ReinforcePPConfig": f"{_ALGORITHMS}.reinforce_pp",
    "RewardModelConfig": f"{_ALGORITHMS}.reward_model",
    "RolloutConfig": f"{_ALGORITHMS}.rollout",
    "SFTConfig": f"{_ALGORITHMS}.sft",
}
__all__ = [
    "ConfigError",
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "EvaluateConfig",
    "ExpertIterationConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "PPOConfig",
    "RLOOConfig",
    "ReMaxConfig",
    "ReinforcePPConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SFTConfig",
    "SFTTrainer",
    "TrainResult",
    "TrainingArguments",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
