"""Proximal policy optimisation."""

from typing import ClassVar, Literal, Protocol

from pydantic import Field

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import PolicyConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import (
    KEPT,
    PROMPT_KEYS,
    SEQUENCES,
    Handle,
    Models,
    RolloutSizes,
    scored,
    scored_tokens,
    traced,
)
from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.models import ModelsConfig, OptimizerConfig, Role
from prefect_rlhf.rlhf_tasks.config.settings import MOST_ITERATIONS, Pair
from prefect_rlhf.rlhf_tasks.data.rows import PromptExample, prompt_example


class PPOConfig(PolicyConfig):
    """Proximal policy optimisation (arXiv:1707.06347) with a learned critic and a KL-shaped reward."""

    type: Literal["ppo"] = "ppo"
    groups: ClassVar[Groups] = {
        "Training": (
            "num_ppo_epochs",
            "critic_learning_rate",
            "critic_warmup_iterations",
            "early_stop_ratio",
        ),
        "Score": ("truncated_responses",),
        "KL": ("kl_coef", "kl_estimator", "kl_target", "kl_horizon"),
        "Advantages": ("gamma", "lam", "whiten_rewards", "whiten_advantages", "normalize_values"),
        "Loss": ("cliprange", "cliprange_value", "dual_clip"),
    }
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "critic_warmup_iterations",
            "total_iterations",
            "{first} leaves no iteration for the actor ({second}). Make it smaller.",
            lambda config: config.critic_warmup_iterations >= config.total_iterations,
        ),
    )

    models: ModelsConfig
    truncated_responses: Literal["keep", "zero", "bootstrap"] = Field(
        default="keep",
        description="A response without end token: keep its score, set it to 0, or keep it and bootstrap the return.",
    )
    kl_coef: float = Field(
        default=0.05, ge=0, description="Factor of the KL penalty; its initial value when adaptive."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1", description="Estimator of the per-token KL divergence."
    )
    kl_target: float | None = Field(
        default=None,
        gt=0,
        description="Target KL per sequence of an adaptive kl_coef; default: fixed kl_coef.",
    )
    kl_horizon: int = Field(
        default=10_000, gt=0, le=10**12, description="Sequences over which an adaptive kl_coef reacts."
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount per token.")
    lam: float = Field(default=0.95, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    whiten_rewards: bool = Field(
        default=False, description="Scale rewards, KL penalty included, to std 1 over the batch."
    )
    whiten_advantages: bool = Field(
        default=True, description="Scale advantages to mean 0 and std 1 over the batch."
    )
    normalize_values: bool = Field(default=False, description="The critic learns normalised returns.")
    cliprange: float = Field(default=0.2, gt=0, description="Bound of the policy ratio's distance from 1.")
    cliprange_value: float = Field(
        default=0.2, gt=0, description="Bound of a value's change, in the units that the critic learns."
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="Policy ratio above which a token with a negative advantage costs no more; default: none.",
    )
    num_ppo_epochs: int = Field(default=1, gt=0, le=1000, description="Passes over an iteration's batch.")
    early_stop_ratio: float | None = Field(
        default=None,
        gt=1,
        description="Mean policy ratio of a mini-batch above which the actor skips the iteration's remaining steps.",
    )
    critic_warmup_iterations: int = Field(
        default=0, ge=0, le=MOST_ITERATIONS, description="First iterations, in which only the critic trains."
    )
    critic_learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="The critic's peak learning rate, which replaces TRL's vf_coef; the rest of its optimizer is as "
        "the actor's. Default: the actor's.",
    )

    @property
    def critic_optimizer(self) -> OptimizerConfig:
        """The actor's, with `critic_learning_rate` where that is given."""
        rate = self.critic_learning_rate
        return self.optimizer if rate is None else self.optimizer.model_copy(update={"learning_rate": rate})

    @property
    def passes(self) -> int:
        """Epochs over an iteration's batch."""
        return self.num_ppo_epochs

    def roles(self) -> dict[str, Role]:
        """Actor, critic, ref, and the models that judge."""
        models = self.models
        critic = models.critic or models.reward or models.actor
        return {
            "actor": Role.of(models.actor, "lm", self.optimizer),
            "critic": Role.of(critic, "scalar", self.critic_optimizer),
            "ref": Role.of(models.ref or models.actor, "lm"),
            **models.judges,
        }


DATASET_KEYS = PROMPT_KEYS


class PPOSizes(RolloutSizes, Protocol):
    """The fields of a PPO configuration that the graph depends on."""

    @property
    def records_kept(self) -> bool: ...
    @property
    def truncated_responses(self) -> str: ...


@traced(DATASET_KEYS)
def graph(models: Models, prompts: Handle, config: PPOSizes) -> None:
    """actor generate; reward, ref and critic inference; actor and critic train_step.

    The tokens that top-k and top-p kept are inputs of the calls that compute log-probabilities. The flag of truncated
    responses and their final values are inputs of the train calls.
    """
    kept = KEPT if config.records_kept else ()
    cut = () if config.truncated_responses == "keep" else ("truncated",)
    final = ("final_values",) if config.truncated_responses == "bootstrap" else ()
    judged = (*scored(config), *scored_tokens(config))
    samples = models.actor.generate(prompts.repeat(config.group_size))
    samples |= models.reward.score(samples)
    samples |= models.ref.logprobs(samples)
    samples |= models.critic.inference(samples.select(*SEQUENCES), ("values", *final))
    learning = (*SEQUENCES, "old_logprobs", "ref_logprobs", "values", *judged, *cut, *final)
    models.actor.train(samples.select(*learning, *kept))
    models.critic.train(samples.select(*learning))


ALGORITHM = Algorithm(
    config=PPOConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=prompt_example,
    fetch=PromptExample.values,
    functions="prefect_rlhf.rlhf_tasks.algorithms.ppo.functions",
)
