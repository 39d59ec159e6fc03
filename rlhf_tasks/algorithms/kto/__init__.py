"""Kahneman-Tversky optimisation: learns from single answers that are desirable or not."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from prefect_rlhf.rlhf_tasks.algorithms.registry import Algorithm
from prefect_rlhf.rlhf_tasks.algorithms.shared.configs import PreferenceConfig
from prefect_rlhf.rlhf_tasks.algorithms.shared.graphs import Handle, Models, traced
from prefect_rlhf.rlhf_tasks.config.base import Groups
from prefect_rlhf.rlhf_tasks.config.data import RunRows
from prefect_rlhf.rlhf_tasks.config.settings import Pair
from prefect_rlhf.rlhf_tasks.data.rows import LabelledExample, labelled_examples


class KTOConfig(PreferenceConfig):
    """Kahneman-Tversky optimisation (arXiv:2402.01306) on answers that are labelled desirable or not."""

    type: Literal["kto"] = "kto"
    groups: ClassVar[Groups] = {"Loss": ("desirable_weight", "undesirable_weight")}
    pairs: ClassVar[tuple[Pair, ...]] = (
        Pair(
            "batch_size",
            "num_mini_batches",
            "{first} and {second} leave one sample to an optimizer step, but the KL estimate takes another sample's "
            "answer. Enlarge batch_size.",
            lambda config: config.batch_size == config.num_mini_batches,
        ),
        Pair(
            "desirable_weight",
            "undesirable_weight",
            "{first} and {second}: nothing is learned. Raise one.",
            lambda config: config.desirable_weight == config.undesirable_weight == 0,
        ),
    )

    desirable_weight: float = Field(default=1.0, ge=0, description="Factor of desirable answers' loss.")
    undesirable_weight: float = Field(default=1.0, ge=0, description="Factor of undesirable answers' loss.")

    def mismatched(self, sample: int) -> int:
        """The sample whose answer is combined with this one's prompt: the sample before it in its mini-batch; for the
        first sample, the last one."""
        size = self.batch_size // self.num_mini_batches
        first = sample - sample % size
        return first + (sample - first - 1) % size

    def values_of(self, rows: RunRows, sample: int) -> Mapping[str, Any]:
        """A sample's own sequence, and a mismatched one for the KL estimate: its prompt with another sample's answer,
        cut where it is longer than the longest row, which every model can read."""
        own, other = (rows.values(self.row_of(rows, each)) for each in (sample, self.mismatched(sample)))
        given, taken = (int(each["prompt_tokens"][0]) for each in (own, other))
        mismatched = [*map(int, own["input_ids"][:given]), *map(int, other["input_ids"][taken:])][
            : rows.longest
        ]
        return {
            "input_ids": own["input_ids"],
            "response_mask": _from(given, len(own["input_ids"])),
            "mismatched_ids": mismatched,
            "mismatched_mask": _from(given, len(mismatched)),
            "desirable": own["desirable"],
        }


def _from(given: int, length: int) -> list[bool]:
    """A mask that is True after the first tokens."""
    return [place >= given for place in range(length)]


SEQUENCES = ("input_ids", "response_mask", "mismatched_ids", "mismatched_mask")
DATASET_KEYS = (*SEQUENCES, "desirable")
REF_LOGPS = ("ref_logps", "ref_mismatched_logps")


@traced(DATASET_KEYS)
def graph(models: Models, rows: Handle, config: object) -> None:
    """ref inference; actor train_step. A sample is an answer, and a mismatched one for the KL estimate."""
    answers = rows.select(*SEQUENCES)
    answers |= models.ref.inference(answers, REF_LOGPS)
    models.actor.train(answers | rows.select("desirable"))


ALGORITHM = Algorithm(
    config=KTOConfig,
    graph=graph,
    dataset_keys=DATASET_KEYS,
    read_row=labelled_examples,
    fetch=LabelledExample.values,
    functions="prefect_rlhf.rlhf_tasks.algorithms.kto.functions",
    stored_keys=("input_ids", "prompt_tokens", "desirable"),
)
