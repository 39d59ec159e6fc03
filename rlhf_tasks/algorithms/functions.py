"""Every algorithm's functions by the names that its configuration and its graph use."""

from collections.abc import Callable, Mapping, Sequence

from rlhf_tasks.algorithms import fetch, ppo, reward_model, rollout, sft
from rlhf_tasks.algorithms.configurations import AnyConfig
from rlhf_tasks.algorithms.shared import generation
from rlhf_tasks.algorithms.shared.context import CallFunction
from rlhf_tasks.data.dataset import Rows
from rlhf_tasks.data.tokenizer import Tokenizer
from rlhf_tasks.parallel.batch.samples import SampleBatch

FUNCTIONS: Mapping[str, Mapping[str, CallFunction]] = {
    "ppo": {
        "actor_generate": generation.generate,
        "reward_inference": rollout.reward_inference_of_ppo,
        "ref_inference": ppo.ref_inference,
        "critic_inference": ppo.critic_inference,
        "actor_train": ppo.actor_train,
        "critic_train": ppo.critic_train,
    },
    "sft": {"actor_train": sft.actor_train},
    "reward_model": {"reward_train": reward_model.reward_train},
    "rollout": {"actor_generate": generation.generate, "reward_inference": rollout.reward_inference},
}

FETCH: Mapping[str, Callable[[Rows, Tokenizer, AnyConfig, Sequence[int]], SampleBatch]] = {
    "ppo": fetch.fetch_prompts,
    "sft": fetch.fetch_completions,
    "reward_model": fetch.fetch_pairs,
    "rollout": fetch.fetch_prompts,
}
