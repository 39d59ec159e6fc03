"""Models and data sets from a Hugging Face Hub, by its own client: with its cache, HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE. Torch-free.

A name is resolved to a commit once, and everything is read from that commit. Only the files that are needed are
downloaded, and what has arrived is compared with the hash that the Hub lists: the client compares sizes alone. What
the cache has is not asked for again, so that a run that knows its commits makes no request.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict

from prefect_rlhf.rlhf_tasks.config.hub_names import HubName, without_login
from prefect_rlhf.rlhf_tasks.data.hub_files import (
    CARD,
    beside_weights,
    data_files,
    refuse_no_model,
    weights_of,
)
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import INDEX
from prefect_rlhf.rlhf_tasks.system.durable import existing
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, one_line, read_json, reading

T = TypeVar("T")
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""(what is downloaded, its bytes) -> inside the context, a function that is called with bytes that have arrived."""

AT_ONCE = 4  # files that are downloaded side by side
TRIES, MOST_WAIT_S = 4, 60.0  # of a question that the Hub answers with 429 or a fault of its own
PIECE_BYTES = 1 << 20
CARD_BYTES = 16 << 20  # a data set's card, with what it says of many subsets
SHA256_LETTERS = 64  # the Hub names a blob by its SHA-256 in git LFS, else by its SHA-1 in git


class Pin(BaseModel):
    """What a name was resolved to. files: of the repository, all that are read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    commit: str
    files: tuple[str, ...]


class Snapshot(NamedTuple):
    """The files of a name on this machine. folder: that of the commit in the Hub's cache"""

    folder: Path
    pin: Pin

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self.folder / file for file in self.pin.files)


def fetch_model(name: HubName, pin: Pin | None, progress: Progress, weights: bool = True) -> Snapshot:
    """The files of a model, downloaded where the cache lacks them.

    pin      the commit that a run has begun with; None: that of the name's revision
    weights  False: only configuration, tokenizer and index, which suffice to plan
    Raises ConfigError with one sentence, whatever is wrong.
    """

    def choose(repository: _Repository) -> list[str]:
        files = repository.files
        refuse_no_model(name, files)
        beside = beside_weights(files)
        if not weights and not repository.reached:
            return beside
        index = None
        if INDEX in files:
            repository.download([INDEX])
            index = read_json(repository.folder / INDEX)
        its_weights = weights_of(name, files, index)
        return beside + its_weights if weights else beside

    return _fetch(name, pin if weights else None, progress, choose)


def fetch_data(name: HubName, pin: Pin | None, progress: Progress, preferred: Sequence[str]) -> Snapshot:
    """The files of the rows that a name means, downloaded where the cache lacks them, as in `fetch_model`.

    preferred  the splits that are meant where the name has none; empty: then there must be only one
    """

    def choose(repository: _Repository) -> list[str]:
        card = ""
        if CARD in repository.files and name.files is None:
            repository.download([CARD])
            with reading(repository.folder / CARD, "cannot be read"):
                content = (repository.folder / CARD).read_bytes()[:CARD_BYTES]
                card = content.decode("utf-8", "replace")
        return data_files(name, card, list(repository.files), preferred)

    return _fetch(name, pin, progress, choose)


def _fetch(
    name: HubName, pin: Pin | None, progress: Progress, choose: "Callable[[_Repository], list[str]]"
) -> Snapshot:
    with _in_a_sentence(name, pin):
        if pin is not None:
            known = Snapshot(snapshot_folder(name, pin.commit), pin)
            if all(_is_whole(known.folder, file) for file in pin.files):
                return known
        commit, reached = (pin.commit, True) if pin is not None else _commit_of(name)
        repository = _Repository(name, commit, progress, reached)
        try:
            files = choose(repository) if pin is None else list(pin.files)
        except ConfigError as error:
            if reached:
                raise
            raise ConfigError(f"{error} Only the cache was read: the Hub was not reached.") from None
        repository.download(files)
        return Snapshot(repository.folder, Pin(commit=commit, files=tuple(files)))


def snapshot_folder(name: HubName, commit: str) -> Path:
    """Where the Hub's cache has a commit's files, if it has them."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE).expanduser().absolute()
    return cache / repo_folder_name(repo_id=name.id, repo_type=name.kind) / "snapshots" / commit


def _commit_of(name: HubName) -> tuple[str, bool]:
    """The commit of a name's revision, and whether the Hub was reached; else it is what the cache knows."""
    from huggingface_hub import HfApi, constants

    class Asked(HfApi):
        reached = False

        def repo_info(self, *args: Any, **options: Any) -> Any:
            info = super().repo_info(*args, **options)
            self.reached = True
            return info

    api = Asked()
    options: dict[str, Any] = {"repo_type": name.kind, "revision": name.revision}
    resolved = _patiently(lambda: api.resolve_revision(name.id, **options).resolved)
    unasked = name.revision == resolved and not constants.HF_HUB_OFFLINE
    return resolved, api.reached or unasked


@dataclass
class _Repository:
    """One commit of a repository. reached: whether the Hub was; else its files are those in the cache"""

    name: HubName
    commit: str
    progress: Progress
    reached: bool

    def __post_init__(self) -> None:
        self.folder = snapshot_folder(self.name, self.commit)
        self._files: Mapping[str, int] | None = None

    @property
    def files(self) -> Mapping[str, int]:
        """File -> bytes, of all that the commit has."""
        if self._files is None:
            self._files = self._listed()
        return self._files

    def _listed(self) -> Mapping[str, int]:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        if not self.reached:
            return self._cached()

        def listed() -> dict[str, int]:
            tree = HfApi().list_repo_tree(
                self.name.id, recursive=True, revision=self.commit, repo_type=self.name.kind
            )
            return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}

        try:
            return _patiently(listed)
        except Exception as error:
            if self._cached() and _is_unreachable(error):
                return self._cached()
            raise

    def _cached(self) -> dict[str, int]:
        return {
            str(path.relative_to(self.folder)): path.stat().st_size
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }

    def download(self, files: Collection[str]) -> None:
        """Download files that the cache lacks. Raises ConfigError where the disk has no room for them."""
        missing = [file for file in dict.fromkeys(files) if not _is_whole(self.folder, file)]
        if not missing:
            return
        total = sum(self.files.get(file, 0) for file in missing)
        _refuse_full_disk(self.name, self.folder, total)
        what = f"{self.name.id}@{self.commit[:8]}: {len(missing)} file{'s' * (len(missing) > 1)}"
        stopped = Event()
        with self.progress(what, total) as advance, ThreadPoolExecutor(AT_ONCE) as pool:
            bar = _counting(advance, stopped)
            try:
                for _ in pool.map(lambda file: self._download(file, bar), missing):
                    pass
            except BaseException:
                stopped.set()  # the other files' threads end at their next piece
                pool.shutdown(cancel_futures=True)
                raise

    def _download(self, file: str, bar: type) -> None:
        from huggingface_hub import hf_hub_download

        options: dict[str, Any] = {"repo_type": self.name.kind, "revision": self.commit, "tqdm_class": bar}
        mark = _mark(self.folder, file)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        path = Path(hf_hub_download(self.name.id, file, **options))
        if (self.folder / file).is_file():
            _verify(self.name, path)
        mark.unlink(missing_ok=True)


def _is_whole(folder: Path, file: str) -> bool:
    """Whether the cache has a file, and no download of ours has ended, or was killed, before its content was
    compared."""
    return (folder / file).is_file() and not _mark(folder, file).exists()


def _mark(folder: Path, file: str) -> Path:
    """What stands beside a repository's snapshots from before a download until the file's content was compared."""
    return folder.parent.parent / ".prefect-rlhf-unverified" / folder.name / file


class _Stopped(Exception):
    """Another file's download has failed, or the user has interrupted it."""


def _counting(advance: Callable[[int], None], stopped: Event) -> type:
    """What the client takes for a progress bar of one file: it counts bytes, and shows nothing."""
    from tqdm import tqdm

    class Counting(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if stopped.is_set():
                raise _Stopped
            advance(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes on the wire, where the client counts these beside the file's own."""

        def set_transfer_postfix_str(self, *args: Any, **options: Any) -> None:
            """Their speed."""

    return Counting


def _verify(name: HubName, path: Path) -> None:
    """Raises ConfigError where a file has another content than the Hub lists, and removes it from the cache."""
    if not path.is_symlink():  # no names of blobs on a file system without links
        return
    blob = Path(os.path.normpath(path.parent / os.readlink(path)))
    if len(blob.name) == SHA256_LETTERS:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() != blob.name:
        for each in (path.resolve(), blob, path):
            each.unlink(missing_ok=True)
        raise ConfigError(
            f"{name.text}: {path.name} has arrived with another content than the Hub lists: its hash is "
            f"{digest.hexdigest()[:12]}..., not {blob.name[:12]}.... It was removed; run the command again."
        )


def _refuse_full_disk(name: HubName, folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(existing(folder)).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"{name.text}: the download needs {needed_bytes} bytes and the disk of {existing(folder)} has "
            f"{free_bytes} free. Free some space, or set HF_HOME to a folder on another disk."
        )


# --- what can go wrong ---


def _patiently(ask: Callable[[], T]) -> T:
    """Ask the Hub; where it is overloaded, again after the seconds that it names."""
    from huggingface_hub.errors import HfHubHTTPError, RevisionResolutionError

    for tried in range(1, TRIES + 1):
        try:
            return ask()
        except (HfHubHTTPError, RevisionResolutionError) as error:
            answer = next((e.response for e in _chain(error) if isinstance(e, HfHubHTTPError)), None)
            if (
                tried == TRIES
                or answer is None
                or not (answer.status_code == 429 or answer.status_code >= 500)
            ):
                raise
            stated = answer.headers.get("Retry-After", "")
            time.sleep(min(MOST_WAIT_S, float(stated) if stated.isdecimal() else 2.0**tried))
    raise AssertionError("the last try returns or raises")


def _is_unreachable(error: BaseException) -> bool:
    """Whether the Hub was not reached at all, or has a fault of its own."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    return isinstance(error, httpx2.TransportError | OfflineModeIsEnabled)


@contextmanager
def _in_a_sentence(name: HubName, pin: Pin | None) -> Iterator[None]:
    """What the client raises becomes a ConfigError of one sentence. It names no header, and so no token."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  of the client, of its HTTP library and of the disk
        _refuse(name, pin, error)


def _refuse(name: HubName, pin: Pin | None, error: BaseException) -> NoReturn:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

    status = next((s for e in _chain(error) if (s := _status(e))), None)
    hub, what = without_login(constants.ENDPOINT), f"{name.text}: {name.shown}"
    began = "" if pin is None else f" The run began with commit {pin.commit}."
    if gated := next((e for e in _chain(error) if isinstance(e, GatedRepoError)), None):
        page = f"{hub}/{'datasets/' * (name.kind == 'dataset')}{name.id}"
        if _status(gated) == 401:
            said = f"is gated. Accept its terms at {page}, then run `hf auth login` or set HF_TOKEN."
        else:
            said = f"is gated, and your token's account has no access. Ask for it at {page}."
        raise ConfigError(f"{what} {said}{began}") from None
    if any(isinstance(e, RevisionNotFoundError) for e in _chain(error)):
        wanted = pin.commit if pin is not None else name.revision or "main"
        raise ConfigError(f"{what} has no revision {wanted!r}.{_revisions(name)}{began}") from None
    if status in (401, 403, 404):
        raise ConfigError(_no_repository(name, status, hub) + began) from None
    if status is not None:
        wait = " It has had too many requests: wait some minutes, or set HF_TOKEN." if status == 429 else ""
        raise ConfigError(
            f"{what} cannot be read: {hub} answers {status}.{wait or ' Try later.'}{began}"
        ) from None
    full = next((e for e in _chain(error) if isinstance(e, OSError) and e.errno in _FULL), None)
    if full is not None:
        raise ConfigError(
            f"{name.text}: the disk of {constants.HF_HUB_CACHE} is full. Free some space, or set HF_HOME to a folder "
            "on another disk; whole files that have arrived are kept."
        ) from None
    raise ConfigError(_unreachable(name, error, hub, constants.HF_HUB_CACHE) + began) from None


_FULL = (28, 122)  # ENOSPC, EDQUOT


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _no_repository(name: HubName, status: int, hub: str) -> str:
    """A sentence for a repository that is not there, or that only an account may see: the Hub does not tell which."""
    from huggingface_hub import get_token

    kind = "data set" if name.kind == "dataset" else "model"
    if get_token() is None:
        remedy = "correct the name; for a private one run `hf auth login` or set HF_TOKEN"
    else:
        remedy = "correct the name, or use a token whose account may read it"
    if status == 401 and get_token() is not None:
        return f"{name.text}: {hub} refuses your token. Run `hf auth login`, or correct or unset HF_TOKEN."
    near = _nearest(name)
    like = f" It has {', '.join(near)}." if near else ""
    return (
        f"{name.text} is no file or folder here, and {hub} has no {kind} {name.id} that you may read.{like} "
        f"{remedy[0].upper()}{remedy[1:]}."
    )


def _nearest(name: HubName) -> list[str]:
    """Similar names among those that the Hub lists of the owner; none where it lists none."""
    from huggingface_hub import HfApi

    owner = name.id.partition("/")[0]
    with suppress(Exception):  # it only makes a sentence better
        listing = HfApi().list_models if name.kind == "model" else HfApi().list_datasets
        ids = [each.id for each in listing(author=owner, limit=500)]
        return get_close_matches(name.id, ids, n=3, cutoff=0.8)
    return []


def _revisions(name: HubName) -> str:
    """A sentence with the branches and tags; empty where they are not known."""
    from huggingface_hub import HfApi

    with suppress(Exception):  # it only makes a sentence better
        refs = HfApi().list_repo_refs(name.id, repo_type=name.kind)
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
        return f" It has {one_line(', '.join(names[:20]))}."
    return ""


def _unreachable(name: HubName, error: BaseException, hub: str, cache: str) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return (
            f"{name.text} is no file or folder here, and HF_HUB_OFFLINE is set, but not all of {name.shown} is in "
            f"{cache}. Download it with the network (`hf download`), or name a folder."
        )
    for each in _chain(error):
        if isinstance(each, EntryNotFoundError) and not isinstance(each, LocalEntryNotFoundError):
            return f"{name.text}: a file of {name.shown} is gone from {hub}. Name another revision."
    root = list(_chain(error))[-1]
    why = one_line(without_login(str(root)).partition("\n")[0]) or type(root).__name__
    return (
        f"{name.text} is no file or folder here, and {name.shown} could not be downloaded from {hub} ({why}). "
        "Look at the network, or name a folder; whole files that have arrived are kept."
    )


def read_pins(path: Path) -> dict[str, Pin]:
    """Name -> what it was resolved to, as a run folder has recorded it. Raises ConfigError for a damaged file."""
    if not path.exists():
        return {}
    document = read_json(path, remedy="Remove it, and names on the Hub are resolved again.")
    with reading(path, "not a record of revisions"):
        return {text: Pin.model_validate(pin) for text, pin in document.items()}


def pins_document(pins: Mapping[str, Pin]) -> str:
    """The content of the file that `read_pins` reads."""
    return (
        json.dumps({text: pin.model_dump(mode="json") for text, pin in sorted(pins.items())}, indent=1) + "\n"
    )
