"""Names of models and data sets on a Hugging Face Hub, as a configuration has them. Nothing is looked up here.

    ORG/NAME[@REVISION]                       a model
    ORG/NAME[@REVISION][:SUBSET][:SPLIT]      a data set; one word alone names a subset or a split
    hf://datasets/ORG/NAME[@REVISION]/FILES   files of a data set, by a path or glob

A path that exists means that path, whatever it looks like (`resolve_paths`).
"""

import re
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["model", "dataset"]

_ID = r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_REVISION = r"(?:@(?P<revision>\w[\w./-]*))?"
_MODEL = re.compile(_ID + _REVISION)
_DATA = re.compile(_ID + _REVISION + r"(?::(?P<first>[\w.+-]+))?(?::(?P<second>[\w.+-]+))?")
_FILES = re.compile(
    r"hf://datasets/" + _ID + r"(?:@(?P<revision>refs/(?:convert|pr)/[\w.-]+|[^/@]+))?/(?P<files>.+)"
)
_ENDS = (".jsonl", ".gz", ".parquet", ".json", ".csv", ".txt", ".yaml")
"""Ends of the names of files, which are no ids."""
_LOGIN = re.compile(r"(?<=://)[^/\s]*@")
_SNAPSHOT = re.compile(r"(?:models|datasets)--(?P<id>.+)")
ADAPTERS = ".prefect-rlhf-adapters"
"""Beside the snapshots of a base model in a Hub's cache: COMMIT/PATH for an adapter in /PATH that is put on it."""
_ON_A_BASE = re.compile(rf"(?P<repository>.*)/{re.escape(ADAPTERS)}/(?P<commit>\w+)(?=/)")


FORM_OF_MODEL = " A model on the Hugging Face Hub is named ORG/NAME."
"""What a sentence about a missing model folder adds."""

FORM_OF_DATA = (
    " A data set on the Hugging Face Hub is named ORG/NAME, ORG/NAME:SPLIT, ORG/NAME:SUBSET:SPLIT, or by its files: "
    "hf://datasets/ORG/NAME/GLOB."
)
"""What a sentence about missing rows adds."""


class HubName(NamedTuple):
    """A name on a Hub.

    text      as the configuration has it
    revision  branch, tag or commit; None: the newest commit of the default branch
    parts     of a data set: what stands behind colons
    files     of a data set: a path or glob of its files; None: as its card or their names say
    """

    text: str
    kind: Kind
    id: str
    revision: str | None = None
    parts: tuple[str, ...] = ()
    files: str | None = None

    @property
    def shown(self) -> str:
        """For sentences: what of the Hub is meant."""
        return f"{'the model' if self.kind == 'model' else 'the data set'} {self.id}"


def hub_model(text: str) -> HubName | None:
    """The model that a text names if it is no path; None where it cannot be a name on a Hub."""
    match = _MODEL.fullmatch(text)
    return None if match is None else HubName(text, "model", match["id"], match["revision"])


def hub_data(text: str) -> HubName | None:
    """The data set that a text names if it is no path; None where it cannot be a name on a Hub."""
    if match := _FILES.fullmatch(text):
        return HubName(text, "dataset", match["id"], match["revision"], files=match["files"])
    match = None if text.endswith(_ENDS) else _DATA.fullmatch(text)
    if match is None:
        return None
    parts = tuple(part for part in (match["first"], match["second"]) if part)
    return HubName(text, "dataset", match["id"], match["revision"], parts)


def is_address(text: str) -> bool:
    """Whether a text has a scheme, so that it is no local path though it may be no name either."""
    return "://" in text


def name_of_folder(folder: str) -> str:
    """`ORG/NAME@COMMIT` for a snapshot in a Hub's cache (`models--ORG--NAME/snapshots/COMMIT`), wherever that lies;
    any other folder as it is. An adapter's, put on a base model's snapshot, is that of the adapter alone."""
    folder = _ON_A_BASE.sub("", folder)
    path = Path(folder)
    match = _SNAPSHOT.fullmatch(path.parent.parent.name) if path.parent.name == "snapshots" else None
    return folder if match is None else f"{match['id'].replace('--', '/', 1)}@{path.name}"


def base_of_name(folder: str) -> str | None:
    """`ORG/NAME@COMMIT` of the base model on whose snapshot an adapter is put; None of any other folder."""
    match = _ON_A_BASE.match(folder)
    return None if match is None else name_of_folder(f"{match['repository']}/snapshots/{match['commit']}")


def without_login(text: str) -> str:
    """A text in which no address has a user and password (`https://me:secret@host`), as HF_ENDPOINT may."""
    return _LOGIN.sub("", text)
