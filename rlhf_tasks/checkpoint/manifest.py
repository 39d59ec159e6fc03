"""The manifest of a commit or of a dump (dumps.py), and the check that all files in it are there and unchanged.
Torch-free.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from prefect_rlhf.rlhf_tasks.checkpoint.journals import JournalMarks
from prefect_rlhf.rlhf_tasks.config.files import first_fault
from prefect_rlhf.rlhf_tasks.parallel.layout.parameters import Lora
from prefect_rlhf.rlhf_tasks.parallel.layout.shape import Head
from prefect_rlhf.rlhf_tasks.parallel.layout.slices import Layout
from prefect_rlhf.rlhf_tasks.parallel.layout.topology import Placement
from prefect_rlhf.rlhf_tasks.spec import Frozen, SavedShape
from prefect_rlhf.rlhf_tasks.system.durable import CHUNK_BYTES, no_link, sync, write_file
from prefect_rlhf.rlhf_tasks.system.failpoints import Point, reach
from prefect_rlhf.rlhf_tasks.system.reading import reading, shown

SCHEMA = 2
MANIFEST = "manifest.json"
CHECKSUM = "manifest.json.sha256"  # in the format of `sha256sum -c`
READERS = 8  # files that are hashed at once; a thread hashes 1 to 2 GB/s


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file and the reason."""


class RoleRecord(Frozen):
    """The saved state of a role besides tensors, and the layout of its tensors over the files.

    version         number of train calls applied
    optimizer_step  number of optimizer updates applied
    state           e.g. KL coefficient and value normaliser
    lora            the adapters whose state alone is saved; None where all of the model trains
    """

    version: int
    optimizer_step: int
    state: dict[str, Any]
    shape: SavedShape
    head: Head
    placement: Placement
    lora: Lora | None = None

    @property
    def layout(self) -> Layout:
        return Layout(self.shape, self.head, self.placement, self.lora)


class StoredFile(Frozen):
    """One file of a commit, by its plain name inside the commit's folder.

    role  whose state it has, or the call whose samples
    """

    role: str
    file: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class PartReport(Frozen):
    """A rank's report that its part of a role's snapshot is durable (`SavedPart.details`).

    record  None where the part has samples that were drawn ahead
    """

    stored: StoredFile
    record: RoleRecord | None


class Contents(Frozen):
    """A folder's table of contents.

    schema_version  of its class: another one is refused
    """

    schema_version: int
    files: tuple[StoredFile, ...]


class Manifest(Contents):
    """The table of contents of a commit.

    step         number of committed iterations
    cursor       global id of the first sample of the next iteration
    versions     trained role -> number of its train calls
    journals     each of the two journals -> its committed part
    config       the run's configuration
    plan_sha256  digest of the execution plan of the last committed iteration; at step 0, of the first plan
    """

    schema_version: int = SCHEMA
    run: str
    attempt: int = Field(ge=0)
    step: int = Field(ge=0)
    seed: int
    cursor: int = Field(ge=0)
    versions: dict[str, int]
    roles: dict[str, RoleRecord]
    journals: JournalMarks
    config: dict[str, Any]
    plan_sha256: str


OfFolder = TypeVar("OfFolder", bound=Contents)


def write_manifest(folder: Path, manifest: Contents) -> None:
    """Write manifest and checksum, and sync them. Raises OSError."""
    data = manifest.model_dump_json(indent=1).encode()
    write_file(folder / MANIFEST, data)
    reach(Point.MANIFEST_WRITTEN)
    write_file(folder / CHECKSUM, _checksum(data))
    sync(folder)


def read_manifest(folder: Path, kind: type[OfFolder] = Manifest) -> OfFolder:
    """Read and check a folder's manifest. Raises CheckpointError naming the file."""
    path = folder / MANIFEST
    if folder.is_symlink():
        raise CheckpointError(f"{path}: {folder} is a symbolic link.")
    try:
        data, checksum = _read(path), _read(folder / CHECKSUM)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}.") from error
    if checksum != _checksum(data):
        raise CheckpointError(f"{path}: its checksum is not the one in {CHECKSUM}.")
    with reading(path, "not a manifest", CheckpointError):
        schema = json.loads(data).get("schema_version")
        if schema != (ours := kind.model_fields["schema_version"].default):
            raise CheckpointError(
                f"{path}: schema {shown(schema)}; this version of prefect-rlhf reads {ours}. Use the version that "
                "wrote it."
            )
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise CheckpointError(f"{path}: not a manifest: {first_fault(error)}") from None


def verify(folder: Path, kind: type[OfFolder] = Manifest) -> OfFolder:
    """Check the manifest of a folder, and the size and hash of every file in it, several files at once.

    Raises CheckpointError naming the first file that is missing or has changed. Other files are not opened.
    """
    manifest = read_manifest(folder, kind)
    for stored in manifest.files:
        path = folder / stored.file
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path}: missing, or not a plain file.")
        size_bytes = path.stat().st_size
        if size_bytes != stored.size_bytes:
            raise CheckpointError(f"{path}: {size_bytes} bytes instead of {stored.size_bytes}.")
    with ThreadPoolExecutor(READERS) as readers:
        digests = readers.map(_hash_file, [folder / stored.file for stored in manifest.files])
        for stored, digest in zip(manifest.files, digests, strict=True):
            if digest != stored.sha256:
                raise CheckpointError(
                    f"{folder / stored.file}: its content has changed since it was written."
                )
    return manifest


def _read(path: Path) -> bytes:
    with open(path, "rb", opener=no_link) as file:
        return file.read()


def _checksum(data: bytes) -> bytes:
    return f"{hashlib.sha256(data).hexdigest()}  {MANIFEST}\n".encode()


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
