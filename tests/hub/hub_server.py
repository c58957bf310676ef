"""A small stand-in for the Hub, for the real client `huggingface_hub`.

It speaks what the client uses to look up, list, download, create, branch, commit to and upload LFS
files of model repositories, and to download datasets, which are not kept apart. It keeps everything
in memory. Processes that use it are started with `HF_ENDPOINT`, with a private `HF_HOME`, and with
`HF_HUB_DISABLE_XET=1`: the Hub's newer store for large files, Xet, is reached by compiled code with
a protocol of its own and cannot be imitated, so that nothing here tests it.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import yaml

COMMIT = f"{1:040x}"
TOKEN = "hf_token_of_the_tests"
NAMESPACE = "me"
KINDS = "(?:models|datasets)"
LFS_BYTES = 5_000
"""Files from this size are LFS files, and so are safetensors."""


@dataclass
class Repository:
    """The files of each branch by path, and the message and branch of each commit."""

    branches: dict[str, dict[str, bytes]]
    is_private: bool = False
    commits: list[tuple[str, str]] = field(default_factory=lambda: [("main", "first")])

    @property
    def head(self) -> str:
        return f"{len(self.commits):040x}"

    def files(self, revision: str) -> dict[str, bytes] | None:
        known = {"v1": "main", self.head: "main", COMMIT: "main"}
        return self.branches.get(known.get(revision, revision))


@dataclass(frozen=True)
class Answer:
    """A response."""

    status: int
    body: Any = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Request:
    """The request of a client."""

    method: str
    path: str
    headers: Message
    body: bytes = b""

    @property
    def token(self) -> str | None:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") or None

    def json(self) -> Any:
        return json.loads(self.body)


class HubServer:
    """Serves repositories on 127.0.0.1.

    Args:
        folders: Folder by repository id, for repositories that have files from the start. One whose
            name contains `gated` is refused, one with `broken` fails, one with `hidden` is private.

    Attributes:
        repositories: All repositories by their id.
        requests: What was asked for, in order.
        cuts: Where a download of a file ends too early, by its name; each is used once.
        stalls: Where a download of a file waits without end, by its name; each is used once.
        changed: Other content of a file than the one that is listed, by its name.
        failures: Answers to the next requests whose path contains a text; each is used once.
        stalled: Set when an upload waits, as each does while `stall_uploads` is set, or a download.
    """

    def __init__(self, folders: Mapping[str, Path] | None = None):
        self.repositories: dict[str, Repository] = {}
        for name, folder in (folders or {}).items():
            self.add(name, folder)
        self.requests: list[Request] = []
        self.cuts: dict[str, int] = {}
        self.stalls: dict[str, int] = {}
        self.changed: dict[str, bytes] = {}
        self.failures: list[tuple[str, Answer]] = []
        self.stall_uploads = False
        self.stalled = threading.Event()
        self._closing = threading.Event()
        self._objects: dict[str, bytes] = {}
        hub = self

        # HTTP/1.0, the default, so that no connection outlives `close`
        class Handler(BaseHTTPRequestHandler):
            def handle_one(self) -> None:
                # a client that was killed takes no answer
                with suppress(ConnectionError):
                    hub.handle(self)

            do_GET = do_HEAD = do_POST = do_PUT = handle_one

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def add(self, name: str, folder: Path) -> None:
        """Takes the files of a folder as a repository."""
        files = {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file()
        }
        self.repositories[name] = Repository({"main": files}, is_private="hidden" in name)

    def asked(self, method: str, pattern: str = "") -> list[str]:
        """The paths that were asked for with a method and contain a pattern."""
        return [
            request.path
            for request in self.requests
            if request.method == method and re.search(pattern, request.path)
        ]

    def downloaded(self) -> list[str]:
        """The names of the files that were asked for."""
        return [path.rpartition("/")[2] for path in self.asked("GET", "/resolve/")]

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path).strip("/")
        request = Request(handler.command, path, handler.headers)
        self.requests.append(request)
        if request.method == "PUT" and self.stall_uploads:
            handler.rfile.read(100)
            self.stalled.set()
            self._closing.wait()
            return
        body = _body(handler)
        if body is None:
            return
        request.body = body
        answer = self._answer(request)
        self._respond(handler, answer)

    def _respond(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        is_file = isinstance(answer.body, bytes)
        body = answer.body if is_file else json.dumps(answer.body).encode()
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Type", "text/plain" if is_file else "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        name = handler.path.rpartition("/")[2]
        stall = self.stalls.pop(name, None) if is_file else None
        end = self.cuts.pop(name, None) if is_file else None
        handler.wfile.write(body[: end if stall is None else stall])
        if stall is not None:
            handler.wfile.flush()
            self.stalled.set()
            self._closing.wait()

    def _answer(self, request: Request) -> Answer:
        path = request.path
        for number, (pattern, answer) in enumerate(self.failures):
            if pattern in path and request.method != "HEAD":
                del self.failures[number]
                return answer
        for method, pattern, answer in (
            ("POST", r"api/repos/create", self._create),
            ("POST", r"api/validate-yaml", _validate),
            ("POST", r"api/models/([^/]+/[^/]+)/branch/(.+)", self._branch),
            ("POST", r"api/models/([^/]+/[^/]+)/preupload/(.+)", self._preupload),
            ("POST", r"api/models/([^/]+/[^/]+)/commit/(.+)", self._commit),
            ("POST", r"([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            ("PUT", r"lfs/([0-9a-f]+)", self._store),
            ("POST", r"lfs/([0-9a-f]+)/verify", self._verify),
            ("GET", rf"api/{KINDS}/([^/]+/[^/]+)(?:/revision/(.+))?", self._information),
            ("GET", rf"api/{KINDS}/([^/]+/[^/]+)/tree/([^/]+)", self._tree),
            ("GET", r"(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._file),
        ):
            match = re.fullmatch(pattern, path)
            if match and request.method.replace("HEAD", "GET") == method:
                result: Answer = answer(request, *match.groups())
                return result
        return Answer(404)

    def _readable(self, request: Request, name: str) -> Repository | Answer:
        repository = self.repositories.get(name)
        if repository is None or (repository.is_private and request.token != TOKEN):
            return _refusal(404 if request.token == TOKEN else 401, "RepoNotFound")
        if "gated" in name:
            return _refusal(401 if request.token is None else 403, "GatedRepo")
        return Answer(500) if "broken" in name else repository

    def _writable(self, request: Request, name: str, revision: str) -> Repository | Answer:
        if denial := _denied(request, name):
            return denial
        repository = self._readable(request, name)
        if isinstance(repository, Answer) or revision in repository.branches:
            return repository
        return _refusal(404, "RevisionNotFound")

    def _create(self, request: Request) -> Answer:
        asked = request.json()
        name = f"{asked['organization'] or NAMESPACE}/{asked['name']}"
        if denial := _denied(request, name):
            return denial
        status = 409 if name in self.repositories else 200
        if status == 200:
            is_private = asked.get("visibility") == "private"
            self.repositories[name] = Repository({"main": {}}, is_private)
        return Answer(status, {"url": f"{self.url}/{name}"})

    def _branch(self, request: Request, name: str, branch: str) -> Answer:
        repository = self._writable(request, name, "main")
        if isinstance(repository, Answer):
            return repository
        status = 409 if branch in repository.branches else 201
        repository.branches.setdefault(branch, dict(repository.branches["main"]))
        return Answer(status)

    def _preupload(self, request: Request, name: str, revision: str) -> Answer:
        repository = self._writable(request, name, revision)
        if isinstance(repository, Answer):
            return repository
        files = []
        for asked in request.json()["files"]:
            path, old = asked["path"], repository.branches[revision].get(asked["path"])
            is_large = asked["size"] >= LFS_BYTES or path.endswith(".safetensors")
            entry = {"path": path, "uploadMode": "lfs" if is_large else "regular"}
            if old is not None:
                entry["oid"] = hashlib.sha256(old).hexdigest() if is_large else _git_id(old)
            files.append(entry | {"shouldIgnore": False})
        return Answer(200, {"files": files})

    def _batch(self, request: Request, name: str) -> Answer:
        asked = request.json()
        repository = self._writable(request, name, asked.get("ref", {"name": "main"})["name"])
        if isinstance(repository, Answer):
            return repository
        objects = []
        for entry in asked["objects"]:
            href = f"{self.url}/lfs/{entry['oid']}"
            actions = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            is_known = entry["oid"] in self._objects
            objects.append(entry if is_known else entry | {"actions": actions})
        return Answer(200, {"transfer": "basic", "objects": objects})

    def _store(self, request: Request, oid: str) -> Answer:
        if hashlib.sha256(request.body).hexdigest() != oid:
            return Answer(400)
        self._objects[oid] = request.body
        return Answer(200)

    def _verify(self, request: Request, oid: str) -> Answer:
        size = request.json()["size"]
        return Answer(200 if len(self._objects.get(oid, b"")) == size else 400)

    def _commit(self, request: Request, name: str, revision: str) -> Answer:
        repository = self._writable(request, name, revision)
        if isinstance(repository, Answer):
            return repository
        files = dict(repository.branches[revision])
        for line in map(json.loads, request.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repository.commits.append((revision, value["summary"]))
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self._objects[value["oid"]]
        repository.branches[revision] = files
        url = f"{self.url}/{name}/commit/{repository.head}"
        return Answer(200, {"success": True, "commitOid": repository.head, "commitUrl": url})

    def _information(self, request: Request, name: str, revision: str | None) -> Answer:
        repository = self._readable(request, name)
        if isinstance(repository, Answer):
            return repository
        if repository.files(revision or "main") is None:
            return _refusal(404, "RevisionNotFound")
        body = {"id": name, "sha": repository.head, "private": repository.is_private}
        return Answer(200, body | {"siblings": []})

    def _tree(self, request: Request, name: str, revision: str) -> Answer:
        repository = self._readable(request, name)
        if isinstance(repository, Answer):
            return repository
        files = repository.files(revision)
        if files is None:
            return _refusal(404, "RevisionNotFound")
        listing = [
            {"type": "file", "path": path, "size": len(content), "oid": _git_id(content)}
            for path, content in sorted(files.items())
        ]
        return Answer(200, listing)

    def _file(self, request: Request, name: str, revision: str, path: str) -> Answer:
        repository = self._readable(request, name)
        if isinstance(repository, Answer):
            return repository
        content = (repository.files(revision) or {}).get(path)
        if content is None:
            return _refusal(404, "EntryNotFound")
        start = 0
        if wanted := request.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{_git_id(content)}"', "X-Repo-Commit": repository.head}
        if len(content) >= LFS_BYTES or path.endswith(".safetensors"):
            digest = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        content = self.changed.get(path, content)
        return Answer(206 if start else 200, content[start:], headers)


def _git_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _refusal(status: int, code: str) -> Answer:
    return Answer(status, headers={"X-Error-Code": code, "X-Error-Message": code})


def _denied(request: Request, name: str) -> Answer | None:
    """Why the token of a request may not write, if so."""
    if request.token != TOKEN:
        message = "Invalid credentials in Authorization header"
        return Answer(401, {"error": message}, {"X-Error-Message": message})
    if name.split("/")[0] != NAMESPACE:
        return Answer(403, {"error": "You don't have the rights to write here"})
    return None


def _validate(request: Request) -> Answer:
    """Front matter must be YAML with a licence in lower case, so that there is something to refuse."""
    content = request.json()["content"]
    try:
        metadata = yaml.safe_load(content.split("---")[1]) if content.startswith("---") else {}
    except yaml.YAMLError as error:
        return Answer(400, {"errors": [{"message": str(error)}], "warnings": []})
    licence = str(metadata.get("license", ""))
    if licence != licence.lower():
        message = '"license" must be one of the known identifiers'
        return Answer(400, {"errors": [{"message": message}], "warnings": []})
    return Answer(200, {"errors": [], "warnings": []})


def _body(handler: BaseHTTPRequestHandler) -> bytes | None:
    """The body of a request; `None` if the client was gone before all of it came."""
    if handler.headers.get("Transfer-Encoding") != "chunked":
        size = int(handler.headers.get("Content-Length", 0))
        body = handler.rfile.read(size)
        return body if len(body) == size else None
    body = b""
    while line := handler.rfile.readline():
        size = int(line, 16)
        chunk = handler.rfile.read(size)
        handler.rfile.readline()
        if not size:
            return body
        if len(chunk) < size:
            return None
        body += chunk
    return None
