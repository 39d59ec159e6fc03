"""Puts a model on a Hugging Face Hub by the Hub's own client, and checks before a run that it may.

The client runs in a process of its own with a deadline, so that one that hangs ends nothing else. It takes the token
where it always does (HF_TOKEN, or what `hf auth login` has kept); the token is never passed on, nor in a sentence.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from threading import Event, Lock, Timer
from typing import Any, TextIO

from prefect_rlhf.flows.view.terminal import uploading
from prefect_rlhf.rlhf_tasks.config.hub_names import name_of_folder, without_login
from prefect_rlhf.rlhf_tasks.config.models import HubPush
from prefect_rlhf.rlhf_tasks.parallel.layout.weight_files import ADAPTER_CONFIG, ORIGIN, VERDICT
from prefect_rlhf.rlhf_tasks.system.child_processes import die_with_parent, python_call
from prefect_rlhf.rlhf_tasks.system.reading import ConfigError, one_line, read_json

CHECK_S = 120.0  # two questions to the Hub, each with the client's own retries
PUSH_S, LEAST_BYTES_PER_S = 600.0, 200_000.0
"""A push may take so long, and beside it as long as its bytes take at this rate."""
TOLD_BYTES = 1 << 20  # sent between two lines of the client's process

_DESCRIPTIONS = (ADAPTER_CONFIG, "config.json", VERDICT)  # of what the weights are
_WEIGHTS = re.compile(r"[^/]*\.safetensors(\.index\.json)?|(pytorch|adapter)_model[^/]*\.bin(\.index\.json)?")


class PushError(Exception):
    """A model could not be put on the Hub. The message is one sentence."""


def check_push(target: HubPush) -> None:
    """Raises ConfigError where a model could not be put there now: without a valid token that may write, under
    another's name, into a public repository that should be private, or without network."""
    try:
        _in_a_process("check", CHECK_S, repo=target.repo, private=target.private)
    except PushError as error:
        raise ConfigError(f"{target.repo}: {error}") from None


def push_model(folder: Path, target: HubPush, message: str, say: Callable[[str], None] | None = None) -> str:
    """Put a model's folder into a repository, which is made if there is none. Returns its address.

    message  of the commit
    say      prints a line of progress during a run; None: to the terminal
    Raises PushError; the folder is as it was.
    """
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    deadline_s = PUSH_S + size / LEAST_BYTES_PER_S
    work = {"repo": target.repo, "private": target.private, "folder": str(folder), "message": message}
    with uploading(target.repo, size, say) as advance:
        return _in_a_process("push", deadline_s, advance, **work)


def _in_a_process(
    what: str, deadline_s: float, advance: Callable[[int], None] = lambda sent: None, **work: Any
) -> str:
    """What the function `_<what>` returns in a process of its own. Raises PushError with its sentence.

    advance  is called with bytes that were sent
    """
    call = python_call(f"{__name__}:{serve.__name__}", what, json.dumps(work), str(os.getpid()))
    quiet = subprocess.DEVNULL
    with subprocess.Popen(call, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True) as process:
        assert process.stdout is not None
        late = Event()
        timer = Timer(deadline_s, lambda: (late.set(), process.kill()))
        timer.start()
        answer = dict[str, Any]()
        try:
            for line in process.stdout:
                answer = json.loads(line)
                advance(answer.get("sent", 0))
        finally:
            timer.cancel()
            process.kill()
    if late.is_set():
        raise PushError(f"the Hub's client has not ended within {deadline_s:.0f} s.")
    if "refused" in answer:
        raise PushError(answer["refused"])
    if "done" not in answer:
        raise PushError(f"the process of the Hub's client has ended with status {process.returncode}.")
    return answer["done"]


# --- in the process of the client ---


def serve(what: str, work: str, parent: str) -> None:
    """The process's own life: one question, or one push. Lines of its output say how many bytes were sent; the last
    one is the answer."""
    die_with_parent(int(parent))
    arguments, lines = json.loads(work), sys.stdout
    sys.stdout = sys.stderr  # what else is printed
    _tell_sent_bytes(lines)
    try:
        answer = {"done": without_login({"check": _check, "push": _push}[what](**arguments))}
    except Exception as error:  # noqa: BLE001  whatever the client raises, it becomes a sentence
        answer = {"refused": without_login(_without_token(_sentence(error, arguments["repo"])))}
    lines.write(json.dumps(answer) + "\n")


def _tell_sent_bytes(lines: TextIO) -> None:
    """Write a line for the bytes by which the client's own progress bars move. They show themselves to nobody."""
    from huggingface_hub.utils import tqdm

    moved, lock, untold = tqdm.update, Lock(), 0

    def update(bar: tqdm, n: float | None = 1) -> bool | None:
        nonlocal untold
        if getattr(bar, "unit", "") == "B" and not bar.desc.startswith(
            "New Data Upload"
        ):  # which are those that the Hub lacked
            with lock:
                untold += int(n or 0)
                if untold >= TOLD_BYTES:
                    lines.write(json.dumps({"sent": untold}) + "\n")
                    lines.flush()
                    untold = 0
        return moved(bar, n)

    tqdm.update = update  # pyright: ignore[reportAttributeAccessIssue]  nowhere else can one listen


def _check(repo: str, private: bool) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi()
    _refuse_who_may_not_write(api.whoami(), repo)
    try:
        is_private = api.model_info(repo).private
    except RepositoryNotFoundError:
        return ""
    _refuse_public(repo, private, bool(is_private))
    return ""


def _refuse_who_may_not_write(who: Mapping[str, Any], repo: str) -> None:
    """Raises PushError where the Hub says of a token that it may not write under this name."""
    owner, account = repo.partition("/")[0], str(who.get("name"))
    roles = {str(org.get("name")): org.get("roleInOrg") for org in who.get("orgs") or ()}
    if owner != account and owner not in roles:
        names = ", ".join([account, *roles])
        raise PushError(
            f"the token's account may write under {one_line(names)}, not under {owner}. Name one of these."
        )
    if roles.get(owner) == "read":
        raise PushError(
            f"the token's account {account} may only read in {owner}. Ask there for the role `write`."
        )
    token = (who.get("auth") or {}).get("accessToken") or {}
    scopes = token.get("fineGrained") or {}
    allowed = [
        *(scopes.get("global") or ()),
        *(
            right
            for scope in scopes.get("scoped") or ()
            if (scope.get("entity") or {}).get("name") in (owner, repo)
            for right in scope.get("permissions") or ()
        ),
    ]
    if token.get("role") == "read" or (token.get("role") == "fineGrained" and "repo.write" not in allowed):
        raise PushError(
            f"the token may only read. Make one at {_hub()}/settings/tokens that may write to {owner}."
        )


def _refuse_public(repo: str, private: bool, is_private: bool) -> None:
    if private and not is_private:
        raise PushError(
            f"{repo} is public, and a model is put there as private. Name another repository, or allow it: "
            f"{{repo: {repo}, private: false}}, `--public` of export."
        )


def _push(repo: str, private: bool, folder: str, message: str) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    url = str(api.create_repo(repo, private=private, exist_ok=True))
    _refuse_public(repo, private, bool(api.model_info(repo).private))
    files = {str(path.relative_to(folder)): path for path in _files(Path(folder))}
    contents: dict[str, Path | bytes] = {**files}
    if ADAPTER_CONFIG in files:
        contents[ADAPTER_CONFIG] = _for_everybody(read_json(files[ADAPTER_CONFIG]))
    if ORIGIN in files:  # the run's name, not where it lies on this machine
        origin = read_json(files[ORIGIN])
        contents[ORIGIN] = json.dumps({**origin, "run": Path(origin["run"]).name}, indent=2).encode()
    operations = [
        *(CommitOperationDelete(name) for name in _left_over(api.list_repo_files(repo), files)),
        *(
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in sorted(contents.items())
        ),
    ]
    api.create_commit(repo, operations, commit_message=message)
    return url


def _for_everybody(adapter: Mapping[str, Any]) -> bytes:
    """An adapter's configuration without a folder of this machine: a snapshot in the Hub's cache becomes its id and
    commit, another folder its name."""
    base = adapter["base_model_name_or_path"]
    id, _, commit = name_of_folder(base).partition("@") if name_of_folder(base) != base else (base, "", "")
    revision = {"revision": commit} if commit else {}
    name = Path(id).name if Path(id).is_absolute() else id
    return json.dumps({**adapter, "base_model_name_or_path": name, **revision}, indent=2).encode()


def _left_over(there: Collection[str], files: Collection[str]) -> list[str]:
    """The files of an earlier push that would be read with those of this one: weights, their index, an adapter, and
    the configuration of a whole model."""
    return sorted(
        name
        for name in there
        if name not in files and "/" not in name and (name in _DESCRIPTIONS or _WEIGHTS.fullmatch(name))
    )


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _sentence(error: BaseException, repo: str) -> str:
    """What went wrong, and what to do."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    if isinstance(error, PushError):
        return str(error)
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token of the Hub. Run `hf auth login`, or set HF_TOKEN."
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set. Unset it."
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        why = f" ({one_line(error.server_message)})" if error.server_message else ""
        match status:
            case 401:
                return f"{_hub()} does not accept the token{why}. Run `hf auth login`, or correct HF_TOKEN."
            case 403:
                return f"the token may not write to {repo}{why}. Take one that may, or another name."
            case 429:
                return f"{_hub()} has too many requests from here. Try again later."
        return f"{_hub()} answers with status {status}{why}. Try again later."
    if isinstance(error, ValueError) and "repo" in str(error).lower():
        return f"{repo} is no name that the Hub takes ({one_line(str(error))}). Choose another."
    root = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    why = one_line(str(root).partition("\n")[0]) or type(root).__name__
    return f"{_hub()} cannot be reached, or the connection broke ({why}). Look at the network."


def _hub() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _without_token(text: str) -> str:
    """A sentence in which a token, wherever the client may have quoted it, is not."""
    from huggingface_hub import get_token

    token = get_token()
    return text.replace(token, "***") if token else text
