"""A small stand-in for the Hub: model information, file listings and files of local folders."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "1" * 40


class HubServer:
    """Serves folders as repositories on 127.0.0.1.

    Args:
        repositories: Folder by repository id. A repository whose name contains `gated` is refused.
    """

    def __init__(self, repositories: dict[str, Path]):
        self.repositories = repositories
        self.requested: list[str] = []
        hub = self

        # HTTP/1.0, the default, so that no connection outlives `close`
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        path = request.path.split("?")[0]
        parts = path.strip("/").split("/")
        is_api = parts[0] == "api"
        owner, name, kind, revision = (parts[2:] if is_api else parts)[:4]
        repository = f"{owner}/{name}"
        if repository not in self.repositories:
            return _send(request, 404, error="RepoNotFound")
        if "gated" in name:
            return _send(request, 403, error="GatedRepo")
        if "broken" in name:
            return _send(request, 500)
        if revision not in ("main", "v1", COMMIT):
            return _send(request, 404, error="RevisionNotFound")
        folder = self.repositories[repository]
        if is_api and kind == "revision":
            body = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": []}
            return _send(request, 200, json.dumps(body).encode(), "application/json")
        if is_api:
            listing = [
                {
                    "type": "file",
                    "path": str(file.relative_to(folder)),
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                }
                for file in sorted(folder.rglob("*"))
                if file.is_file()
            ]
            return _send(request, 200, json.dumps(listing).encode(), "application/json")
        file = folder.joinpath(*parts[4:])
        if with_body:
            self.requested.append(file.name)
        return self._send_file(request, file.read_bytes(), with_body)

    def _send_file(self, request: BaseHTTPRequestHandler, content: bytes, with_body: bool) -> None:
        etag = hashlib.sha1(content).hexdigest()
        start = 0
        if wanted := request.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        request.send_response(206 if start else 200)
        request.send_header("ETag", f'"{etag}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        if with_body:
            request.wfile.write(content[start:])


def _send(
    request: BaseHTTPRequestHandler,
    status: int,
    body: bytes = b"{}",
    kind: str = "application/json",
    error: str | None = None,
) -> None:
    request.send_response(status)
    if error is not None:
        request.send_header("X-Error-Code", error)
        request.send_header("X-Error-Message", error)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
