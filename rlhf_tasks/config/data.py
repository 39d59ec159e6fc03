"""The section of a run's data sets, and what a configuration reads of its tokenised rows. Torch-free."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self

from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag, WrapValidator

from prefect_rlhf.rlhf_tasks.config.row_objects import rows_or
from prefect_rlhf.rlhf_tasks.config.settings import MOST_TOKENS, Settings
from prefect_rlhf.rlhf_tasks.system.reading import shown


class RunRows(Protocol):
    """The rows of a run by index. `rlhf_tasks.data.token_file.TokenFile` holds them."""

    def __len__(self) -> int: ...

    @property
    def longest(self) -> int:
        """Tokens of the longest list of ids of all rows."""
        ...

    def row_of(self, sample_id: int, seed: int, weights: Sequence[float] = ...) -> int:
        """The row that a global sample id means. weights: of the sources"""
        ...

    def values(self, index: int) -> Mapping[str, Any]:
        """The values of a row by key: lists or arrays of numbers, or text."""
        ...


MOST_SOURCES = 100


class DataSource(NamedTuple):
    """One of the sources of rows. weight: its share of the samples, relative to the other sources'"""

    path: str
    weight: float = 1.0


def _form_of_data(value: Any) -> str:
    return "path" if isinstance(value, str) else "inline" if isinstance(value, dict) else "several"


def _paths(value: Any) -> Any:
    if isinstance(value, str | dict) or (
        isinstance(value, list | tuple) and all(isinstance(path, str) for path in value)
    ):
        return value
    raise ValueError(f"give a path, a list of paths, or {{path: weight}}, found {shown(value)}")


Source = Annotated[str, Field(min_length=1)]
Weight = Annotated[float, Field(gt=0, le=1e9)]
DataFiles = Annotated[
    Annotated[Source, Tag("path")]
    | Annotated[Annotated[tuple[Source, ...], Field(min_length=1, max_length=MOST_SOURCES)], Tag("several")]
    | Annotated[Annotated[dict[Source, Weight], Field(min_length=1, max_length=MOST_SOURCES)], Tag("inline")],
    Discriminator(_form_of_data),
    BeforeValidator(_paths),
    WrapValidator(rows_or),
]


class DataConfig(Settings):
    """Where the rows come from."""

    train: DataFiles = Field(
        description="A data set on the Hugging Face Hub, ORG/NAME[@REVISION][:SUBSET][:SPLIT]; or JSONL (.gz), JSON, "
        "CSV or Parquet: a file, a glob, a folder, or hf://datasets/ORG/NAME/GLOB; or several: [path, path], or with "
        "their shares of the samples {path: weight}. In Python also rows: a list of dicts, or a `datasets.Dataset`.",
    )
    column_map: dict[str, str] = Field(
        default_factory=dict, description="Renames columns: {name in the file: expected name}."
    )
    as_messages: bool = Field(
        default=False,
        description="Of rows with a prompt, text becomes a message: a prompt the user's, an answer the assistant's. "
        "So the model's chat template is applied.",
    )
    max_prompt_tokens: int = Field(
        default=1024,
        gt=0,
        le=MOST_TOKENS,
        description="Longer rows are refused (where nothing is generated: prompt + completion).",
    )
    max_rows: int | None = Field(
        default=None,
        gt=0,
        le=2**40,
        description="Use at most this many rows of each source, the first ones; default: all.",
    )
    on_bad_row: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="Refuse data with a bad or too long row, or skip such rows and list them in skipped-rows.jsonl.",
    )

    _files: Mapping[str, tuple[Path, ...]] = PrivateAttr(default_factory=dict)

    def located(self, files: Mapping[str, tuple[Path, ...]]) -> Self:
        """This section, whose names on a Hub have their files on this machine: by name."""
        located = self.model_copy()
        located._files = dict(files)
        return located

    def files_of(self, source: str) -> tuple[Path, ...] | None:
        """The files of a source that is a name on a Hub, once they are downloaded; None of a path."""
        return self._files.get(source)

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The sources; one where only a path is given."""
        if isinstance(self.train, dict):
            return tuple(DataSource(path, weight) for path, weight in self.train.items())
        paths = (self.train,) if isinstance(self.train, str) else self.train
        return tuple(map(DataSource, paths))

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the sources."""
        return tuple(source.weight for source in self.sources)

    @property
    def name(self) -> str:
        """The sources' paths, for sentences."""
        return ", ".join(source.path for source in self.sources)
