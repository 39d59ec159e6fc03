"""The section of a run's data sets. Torch-free."""

from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
)

from rlhf_tasks.config.settings import MOST_TOKENS, Settings


class DataSource(Settings):
    """One of several sources of rows."""

    path: str = Field(
        min_length=1, description="JSONL (.gz), JSON, CSV or Parquet: a file, a glob or a folder."
    )
    weight: float = Field(
        default=1.0, gt=0, le=1e9, description="Its share of the samples, relative to the other sources'."
    )


def _form_of_data(value: Any) -> str:
    return "path" if isinstance(value, str) else "inline"


DataFiles = Annotated[
    Annotated[Annotated[str, Field(min_length=1)], Tag("path")]
    | Annotated[Annotated[tuple[DataSource, ...], Field(min_length=1, max_length=100)], Tag("inline")],
    Discriminator(_form_of_data),
]


class DataConfig(Settings):
    """Where the rows come from."""

    train: DataFiles = Field(
        description="JSONL (.gz), JSON, CSV or Parquet: a file, a glob or a folder; or several: [{path, weight}].",
    )
    column_map: dict[str, str] = Field(
        default_factory=dict, description="Renames columns: {name in the file: expected name}."
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
        description="Use so many rows of each source at most, the first ones; default: all.",
    )
    on_bad_row: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="Refuse data with a bad or too long row, or skip such rows and list them in skipped-rows.jsonl.",
    )

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """The sources; one where only a path is given."""
        return (DataSource(path=self.train),) if isinstance(self.train, str) else self.train

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the sources."""
        return tuple(source.weight for source in self.sources)

    @property
    def name(self) -> str:
        """The sources' paths, for sentences."""
        return ", ".join(source.path for source in self.sources)
