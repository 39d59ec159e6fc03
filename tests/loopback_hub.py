"""A Hub on loopback that speaks the Hugging Face Hub's protocol to its real client. Import as `tests.loopback_hub`.

It serves repositories (their revisions, trees and files, large ones by a redirect to a second origin, as the Hub
redirects to its CDN), refuses private and gated ones without a token, and takes uploads: `create_repo`,
`upload_folder` and `create_commit`, in which large files go by git LFS. The client's Xet transfer is switched off.
A test sees each request in `requests`, and can have the next ones answered wrongly.

    hub.add("ORG/NAME", {"config.json": b"{}"}) -> the commit's hash; add to it again, and `main` moves
    hub.environment(home)                       -> what a process needs in its environment to use this Hub
    with hub.used_here(home): ...               -> the same for this process
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants
import huggingface_hub.utils

READER, WRITER = "hf_loopbackReader", "hf_loopbackWriter"
"""Tokens: the reader's account may read what is private and what `Repository.members` lists; the writer's, all."""
NAMES = {READER: "reader", WRITER: "writer"}
LARGE = (".safetensors", ".bin", ".parquet", ".gguf", ".gz")
"""Ends of the names of files that git LFS keeps."""
PAGE = 50  # entries of a tree at once
FOR_EVER = 10**9


@dataclass
class Repository:
    """A model or data set. files: of each commit, by its hash; refs: branch or tag -> hash.

    gated    whether only `members` (names of accounts) may read its files
    renamed  the id under which it is today, if this is an older one
    """

    kind: str
    id: str
    private: bool = False
    gated: bool = False
    members: tuple[str, ...] = ()
    renamed: str | None = None
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, changed: Mapping[str, bytes | None], branch: str = "main") -> str:
        """Files added, changed or (None) removed. Returns the hash, to which the branch moves."""
        files = dict(self.files.get(self.refs.get(branch, ""), {}))
        for path, content in changed.items():
            files.pop(path, None)
            if content is not None:
                files[path] = content
        text = "".join(f"{path} {blob_id(content)}\n" for path, content in sorted(files.items()))
        commit = hashlib.sha1(f"{self.id} {len(self.files)} {text}".encode()).hexdigest()
        self.files[commit], self.refs[branch] = files, commit
        return commit

    def hash_of(self, revision: str) -> str | None:
        found = self.refs.get(revision, revision)
        return found if found in self.files else None


def blob_id(content: bytes) -> str:
    """The name that git has for a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith(LARGE)


@dataclass
class Fault:
    """An answer that some of the next requests get. where: a pattern of `METHOD URL`, searched in it

    status   answered, without content
    cut      bytes after which the connection breaks
    content  answered in place of the file's, by the file's headers
    """

    where: str
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    content: bytes | None = None
    times: int = 1


class Hub:
    """The server. url: its address, the client's HF_ENDPOINT."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.stored: dict[str, bytes] = {}
        """SHA-256 -> content of what was uploaded by git LFS."""
        self.requests: list[str] = []
        """`METHOD URL` of each, with its `Range` if it has one."""
        self.leaked: list[str] = []
        """Requests to the second origin that carried a token."""
        self.faults: list[Fault] = []
        self.is_down = False
        self.accounts: dict[str, dict[str, Any]] = {
            token: _account(NAMES[token], role) for token, role in ((READER, "read"), (WRITER, "write"))
        }
        """Token -> what the Hub says of who has it."""
        self.lock = Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)
        for server in self._servers:
            Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.is_down = True
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, id: str, files: Mapping[str, bytes | str | None], kind: str = "model", **facts: Any) -> str:
        """Commit files to the `main` of a repository, which is made if it is new. Returns the commit's hash.

        kind   model or dataset
        facts  as of `Repository`
        """
        repository = self.repositories.setdefault((kind, id), Repository(kind, id))
        for name, value in facts.items():
            setattr(repository, name, value)
        return repository.commit(
            {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
        )

    def add_folder(self, id: str, folder: Path, kind: str = "model", **facts: Any) -> str:
        """The same with the files of a folder."""
        files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        return self.add(id, files, kind, **facts)

    def files(self, id: str, kind: str = "model", revision: str = "main") -> dict[str, bytes]:
        """The files of a repository's revision."""
        repository = self.repositories[kind, id]
        commit = repository.hash_of(revision)
        return repository.files[commit] if commit else {}

    def next_answers(self, where: str, **fault: Any) -> None:
        """The next requests that match `where` get a `Fault`."""
        self.faults.append(Fault(where, **fault))

    def fault(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.where, request):
                    fault.times -= 1
                    return fault
        return None

    def downloads(self) -> list[str]:
        """The names of the files whose content was sent, in order of the requests."""
        return [
            unquote(request.split(" ")[1].split("?")[0].rsplit("/", 1)[1])
            for request in self.requests
            if request.startswith("GET ") and ("/resolve/" in request or "/cdn/" in request)
        ]

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Environment variables by which a process uses this Hub, with its cache in a folder `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "",
            "HF_TOKEN": token or "",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    @contextmanager
    def used_here(self, home: Path, token: str | None = None, offline: bool = False) -> Iterator[None]:
        """This process uses this Hub. The client has read its environment when it was imported."""
        constants = huggingface_hub.constants
        values = {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": offline,
        }
        environment = mock.patch.dict("os.environ", self.environment(home, token))
        with mock.patch.multiple(constants, **values), environment:
            huggingface_hub.utils.close_session()
            yield
        huggingface_hub.utils.close_session()


def _account(name: str, role: str) -> dict[str, Any]:
    """An account whose token has a role, and which may write in the organisation `org`."""
    return {
        "name": name,
        "type": "user",
        "orgs": [{"name": "org", "type": "org", "roleInOrg": "write"}],
        "auth": {"type": "access_token", "accessToken": {"displayName": "test", "role": role}},
    }


_FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_API = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/([\w-]+)(?:/(.+))?)?")
_LFS = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch")


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def do_HEAD(self) -> None:
        self._take(b"")

    def do_GET(self) -> None:
        self._take(b"")

    def do_POST(self) -> None:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self._take(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        body = b""
        while length := int(self.rfile.readline().strip() or b"0", 16):
            body += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        self._take(body)

    do_PUT = do_POST

    def _take(self, body: bytes) -> None:
        if self.hub.is_down:  # connections that the client has kept open
            self.close_connection = True
            return None
        self._fault = None
        request = f"{self.command} {self.path}"
        at = f" {ranged}" if (ranged := self.headers.get("Range")) else ""
        with self.hub.lock:
            self.hub.requests.append(request + at)
        self._fault = self.hub.fault(request)
        if self._fault is not None and self._fault.status is not None:
            return self._send(self._fault.status, b"", self._fault.headers)
        url = urlsplit(self.path)
        path = url.path
        if path.startswith("/cdn/"):
            return self._cdn(path, body)
        if (token := self.token) and token not in NAMES:
            return self._refuse(401, None, "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            if not token:
                return self._refuse(401, None, "Invalid username or password.")
            return self._json(self.hub.accounts[token])
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path in ("/api/models", "/api/datasets"):
            return self._list(path.removeprefix("/api/").removesuffix("s"), parse_qs(url.query))
        if found := _LFS.fullmatch(path):
            return self._lfs(json.loads(body))
        if found := _FILE.fullmatch(path):
            datasets, id, revision, name = found.groups()
            repository = self._repository("dataset" if datasets else "model", id, files=True)
            return repository and self._file(repository, unquote(revision), unquote(name))
        if found := _API.fullmatch(path):
            kind, id, what, rest = found.groups()
            repository = self._repository(kind, id)
            return repository and self._api(repository, what or "revision", rest or "main", body, url.query)
        self._refuse(404, None, "Not found")

    @property
    def token(self) -> str | None:
        return self.headers.get("Authorization", "").removeprefix("Bearer ").strip() or None

    # --- answers ---

    def _send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name in headers or {}):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self._fault and self._fault.cut
        self.wfile.write(content if cut is None else content[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def _json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(
            status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})}
        )

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self._json({"error": message}, status, headers)

    def _repository(self, kind: str, id: str, files: bool = False) -> Repository | None:
        """A repository that may be read; None where the request was refused.

        files  whether the content of a file is asked for, which a gated one refuses; its list of files is public
        """
        repository = self.hub.repositories.get((kind, id))
        account = NAMES.get(self.token or "")
        if repository is not None and repository.renamed:
            target = self.path.replace(id, repository.renamed, 1)
            self._send(307, b"", {"Location": target})
            return None
        if repository is None or (repository.private and account is None):
            # The Hub does not tell strangers whether there is such a repository.
            if account is None:
                self._refuse(401, None, "Invalid username or password.")
            else:
                self._refuse(404, "RepoNotFound", "Repository not found")
            return None
        if files and repository.gated and account not in repository.members:
            who = "You must have access to it and be authenticated to access it. Please log in."
            if account is not None:
                who = "Your request to access it is awaiting a review, or you have made none."
            message = f"Access to {kind} {id} is restricted. {who}"
            self._refuse(401 if account is None else 403, "GatedRepo", message)
            return None
        return repository

    # --- reading ---

    def _list(self, kind: str, query: Mapping[str, list[str]]) -> None:
        owner = query.get("author", [""])[0]
        public = [each for each in self.hub.repositories.values() if each.kind == kind and not each.private]
        self._json([{"id": each.id} for each in public if each.id.startswith(f"{owner}/")])

    def _api(self, repository: Repository, what: str, rest: str, body: bytes, query: str) -> None:
        if what in ("preupload", "commit", "branch", "tag"):
            if self.token != WRITER:
                return self._refuse(403, None, "You have no write access to this repository")
            return self._write(repository, what, unquote(rest), body)
        if what == "refs":
            branches = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
                for name, commit in repository.refs.items()
            ]
            return self._json({"branches": branches, "tags": [], "converts": []})
        revision, _, folder = unquote(rest).partition("/")
        if what == "revision":
            revision, folder = unquote(rest), ""
        commit = repository.hash_of(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.files[commit]
        if what == "revision":
            siblings = [{"rfilename": path} for path in sorted(files)]
            facts = {"private": repository.private, "gated": "manual" if repository.gated else False}
            return self._json({"id": repository.id, "sha": commit, "siblings": siblings, "tags": [], **facts})
        if what == "paths-info":
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            return self._json([_entry(path, files[path]) for path in asked if path in files])
        if what == "tree":
            entries = [_entry(path, files[path]) for path in sorted(files) if path.startswith(folder)]
            start = int(parse_qs(query).get("cursor", ["0"])[0])
            more = start + PAGE < len(entries)
            next_page = f"{self.hub.url}{urlsplit(self.path).path}?recursive=True&cursor={start + PAGE}"
            link = {"Link": f'<{next_page}>; rel="next"'} if more else {}
            return self._json(entries[start : start + PAGE], headers=link)
        self._refuse(404, None, "Not found")

    def _file(self, repository: Repository, revision: str, name: str) -> None:
        commit = repository.hash_of(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        headers = {"X-Repo-Commit": commit}
        content = repository.files[commit].get(name)
        if content is None:
            code = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self._json({"error": "Entry not found"}, 404, headers | code)
        if is_large(name):
            oid = hashlib.sha256(content).hexdigest()
            self.hub.stored[oid] = content
            return self._send(
                302,
                b"",
                headers
                | {
                    "X-Linked-ETag": f'"{oid}"',
                    "X-Linked-Size": str(len(content)),
                    "Location": f"{self.hub.cdn}/cdn/{oid}/{name.rsplit('/', 1)[-1]}?signature=1",
                },
            )
        self._content(content, headers | {"ETag": f'"{blob_id(content)}"'})

    def _cdn(self, path: str, body: bytes) -> None:
        """The second origin: signed addresses of large files, which take no token."""
        if self.headers.get("Authorization"):
            self.hub.leaked.append(self.path)
        oid = path.split("/")[2]
        if self.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                return self._refuse(400, None, "another content than announced")
            self.hub.stored[oid] = body
            return self._send(200, b"", {"ETag": f'"{oid}"'})
        if oid not in self.hub.stored:
            return self._refuse(403, None, "The signature is not valid")
        self._content(self.hub.stored[oid], {"ETag": f'"{oid}"'})

    def _content(self, content: bytes, headers: Mapping[str, str]) -> None:
        if self._fault is not None and self._fault.content is not None:
            content = self._fault.content
        headers = {"Accept-Ranges": "bytes", **headers}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            headers["Content-Length"] = str(len(content))
            return self._send(200, content, headers)
        first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        headers["Content-Length"] = str(last + 1 - first)
        self._send(206, content[first : last + 1], headers)

    # --- writing ---

    def _create(self, wanted: Mapping[str, Any]) -> None:
        if self.token != WRITER:
            return self._refuse(403, None, "You have no rights to create a repository under this namespace")
        id = f"{wanted.get('organization') or NAMES[WRITER]}/{wanted['name']}"
        kind = wanted.get("type", "model")
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        url = {"url": f"{self.hub.url}/{'datasets/' if kind == 'dataset' else ''}{id}"}
        if (kind, id) in self.hub.repositories:
            return self._json({"error": "You already created this repo", **url}, 409)
        self.hub.add(id, {".gitattributes": "*.safetensors filter=lfs\n"}, kind, private=private)
        self._json(url)

    def _lfs(self, wanted: Mapping[str, Any]) -> None:
        objects: list[dict[str, Any]] = []
        for each in wanted["objects"]:
            oid = each["oid"]
            known = (
                {}
                if oid in self.hub.stored
                else {"actions": {"upload": {"href": f"{self.hub.cdn}/cdn/{oid}/upload"}}}
            )
            objects.append({"oid": oid, "size": each["size"], **known})
        self._json({"transfer": "basic", "objects": objects})

    def _write(self, repository: Repository, what: str, revision: str, body: bytes) -> None:
        if what in ("branch", "tag"):
            given = json.loads(body or b"{}")
            if what == "branch":
                commit = repository.hash_of(given.get("startingPoint") or "main")
                repository.refs[revision] = commit or ""
            else:
                repository.refs[given["tag"]] = repository.hash_of(revision) or ""
            return self._json({})
        if what == "preupload":
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if is_large(each["path"]) else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            return self._json({"files": modes})
        changed: dict[str, bytes | None] = {}
        for line in body.splitlines():
            value = (item := json.loads(line))["value"]
            match item["key"]:
                case "file":
                    changed[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    changed[value["path"]] = self.hub.stored[value["oid"]]
                case "deletedFile":
                    changed[value["path"]] = None
                case "deletedFolder":
                    files = repository.files[repository.refs[revision]]
                    changed |= dict.fromkeys(p for p in files if p.startswith(value["path"]))
        commit = repository.commit(changed, revision)
        self._json({"commitUrl": f"{self.hub.url}/{repository.id}/commit/{commit}", "commitOid": commit})


def _entry(path: str, content: bytes) -> dict[str, Any]:
    """A file in a tree's listing."""
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
    if is_large(path):
        oid = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
    return entry
