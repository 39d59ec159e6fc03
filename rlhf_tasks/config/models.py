"""Sections of the models that a run has, their optimizers and adapters; the roles that follow. Torch-free."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator

from prefect_rlhf.rlhf_tasks.config.settings import MOST_ITERATIONS, Settings, form
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora, linear_modules
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head, ModelShape
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import MOST_RANK
from prefect_rlhf.rlhf_tasks.system.reading import shown


def _content_of_a_config(value: dict[str, Any]) -> dict[str, Any]:
    if set(value) == {"config"}:
        raise ValueError("a model's configuration stands here itself: {model_type: ...}, not under config")
    return value


ModelSource = Annotated[
    Annotated[str, Tag("path")]
    | Annotated[Annotated[dict[str, Any], AfterValidator(_content_of_a_config)], Tag("inline")],
    Discriminator(form),
]
"""A model on the Hugging Face Hub, ORG/NAME[@REVISION]; a model's folder; or the content of a Hugging Face
config.json, without weights: enough to plan, not to run."""


JUDGE = "judge"
"""The role of a language model that grades responses by its replies (docs/adr/0045-a-judge-of-the-run.md)."""
JUDGE_REPLIES = "judge_replies"
"""The key of its replies about a sample, a JSON list, and the column that rewards get: a text for each question, None
for one that has no room in the judge's context."""


class ActorOnly(Settings):
    """The model of the one role of SFT and reward modelling: ORG/NAME[@REVISION] on the Hugging Face Hub, or a
    folder. Planning also accepts a mapping, the content of a config.json."""

    actor: ModelSource = Field(
        description="Model the training starts from, ORG/NAME[@REVISION] or a folder; its tokenizer serves the whole "
        "run."
    )

    @property
    def tokenizer(self) -> str:
        """The folder whose tokenizer serves the run. Raises ValueError where the actor has no folder."""
        if not isinstance(self.actor, str):
            raise ValueError(
                "models.actor is an inline config, which has no tokenizer. Name a model folder; to plan without one, "
                "give planning.prompt_tokens."
            )
        return self.actor


class ReferenceModels(ActorOnly):
    """Hugging Face folders of an actor and its frozen reference."""

    ref: ModelSource | None = Field(
        default=None, description="Folder of the frozen reference; default: the actor."
    )


class DistillationModels(ActorOnly):
    """Hugging Face folders of a student, the actor, and its teacher."""

    teacher: ModelSource = Field(description="Folder of the frozen teacher, whose tokenizer is the actor's.")


class RolloutModels(ActorOnly):
    """Hugging Face folders of a rollout."""

    reward: ModelSource | None = Field(
        default=None, description="Folder of a reward model that also scores; default: none."
    )
    judge: ModelSource | None = Field(
        default=None,
        description="Folder of a frozen language model that the reward builtin:judge asks; default: none.",
    )

    @property
    def judges(self) -> "dict[str, Role]":
        """The roles of the models that judge responses: reward and judge, where they are named."""
        roles = dict[str, Role]()
        if self.reward is not None:
            roles["reward"] = Role.of(self.reward, "scalar")
        if self.judge is not None:
            roles[JUDGE] = Role.of(self.judge, "lm")
        return roles


class GRPOModels(ReferenceModels, RolloutModels):
    """Hugging Face folders of the roles of GRPO, which has no critic."""


class ModelsConfig(GRPOModels):
    """Hugging Face folders of the roles of PPO."""

    critic: ModelSource | None = Field(
        default=None,
        description="Folder the critic starts from; default: the reward model, or else the actor.",
    )


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule. Steps are optimizer steps (mini-batches), not iterations."""

    learning_rate: float = Field(default=3e-6, gt=0, description="Peak learning rate.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="After the warm-up: constant, or decayed to 0 at the last step."
    )
    warmup_steps: int = Field(
        default=0, ge=0, le=MOST_ITERATIONS, description="Optimizer steps of linear warm-up from 0."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay, on matrices only.")
    adam_betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.95), description="Decay rates of AdamW's two moments."
    )
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="Global gradient norm to which gradients are clipped."
    )


class LoraConfig(Settings):
    """Low-rank adapters (LoRA, arXiv:2106.09685): they train, the model's own weights are frozen. No dropout."""

    rank: int = Field(default=16, gt=0, le=MOST_RANK, description="Rank of the adapters (peft's r).")
    alpha: float = Field(
        default=32.0,
        gt=0,
        description="An adapter's output is multiplied by alpha / rank (peft's lora_alpha).",
    )
    targets: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="Linear layers with an adapter (peft's target_modules), as in [q_proj, v_proj]; default: all.",
    )
    export: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="What the run exports: the adapter, a folder for peft; or the model with the adapter merged in.",
    )

    @field_validator("targets")
    @classmethod
    def _in_one_order(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Sorted, each once: the order in which they are named does not make another adapter, or another run."""
        return value and tuple(sorted(set(value)))

    def adapters(self, shape: ModelShape) -> Lora:
        """The adapters of a model. Raises ConfigError for targets that it lacks and for too large a rank."""
        lora = Lora(self.rank, self.alpha, self.targets or tuple(sorted(linear_modules(shape))))
        lora.check(shape)
        return lora


_REPO = re.compile(r"[A-Za-z0-9][\w-]*/(?!.*(--|\.\.))[A-Za-z0-9]([\w.-]{0,94}\w)?(?<!\.git)")


class HubPush(Settings):
    """A repository on a Hugging Face Hub that gets the finished model."""

    repo: str = Field(description="ORG/NAME; ORG may be an account.")
    private: bool = Field(default=True, description="Whether only its owner may see it.")

    @field_validator("repo")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not _REPO.fullmatch(value):
            raise ValueError(
                f"{shown(value)} is no name of a model on the Hub. Write ORG/NAME with letters, digits, '-', '_' and "
                "'.', neither '--' nor '..'; NAME has at most 96, and ends with a letter or digit"
            )
        return value


def named_alone(value: Any) -> Any:
    """A `HubPush` of which the name alone is given."""
    return {"repo": value} if isinstance(value, str) else value


class Role(NamedTuple):
    """What the engine must know of a role: its initial weights, its head, and whether it trains.

    folder       Hugging Face folder of the initial weights; "" for an inline model
    optimizer    None for a frozen role
    random_init  the folder has only the model's configuration; its weights are drawn from the run's seed
    config       the configuration of an inline model; None where there is a folder
    """

    folder: str
    head: Head
    optimizer: OptimizerConfig | None
    random_init: bool = False
    config: Mapping[str, Any] | None = None

    @staticmethod
    def of(source: ModelSource, head: Head, optimizer: OptimizerConfig | None = None) -> "Role":
        """The role of a model given by folder or inline."""
        if isinstance(source, str):
            return Role(source, head, optimizer)
        return Role("", head, optimizer, config=source)
