"""A small hub: as much of the Hugging Face hub's HTTP interface as huggingface_hub needs to list and download one model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the files of ``folder`` as the model ``repo_id`` at ``COMMIT``, which main names; keeps what was asked for.

    ``gated`` asks for the token "secret"; ``stall_after`` stops sending a file after so many bytes until ``go_on`` is set;
    ``declared`` overrides the sizes that the listing gives.
    """

    daemon_threads = True

    def __init__(self, repo_id: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repo_id, self.folder = repo_id, folder
        self.gated, self.stall_after = False, 0
        self.declared: dict[str, int] = {}
        self.requests: list[tuple[str, str, str]] = []  # method, path, Range
        self.stalled, self.go_on = threading.Event(), threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Silent."""

    def _answer(self, body: bool) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        listing, files = f"/api/models/{hub.repo_id}/revision/", f"/{hub.repo_id}/resolve/"
        if path.startswith(listing):
            self._list(path.removeprefix(listing))
        elif not path.startswith(files):
            self._refuse(404, "RepoNotFound")
        elif hub.gated and self.headers.get("Authorization") != "Bearer secret":
            self._refuse(401, "GatedRepo")
        else:
            revision, _, name = path.removeprefix(files).partition("/")
            self._send_file(revision, name, body)

    def _list(self, revision: str) -> None:
        if revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
            return
        hub = self.server
        siblings = []
        for path in sorted(p for p in hub.folder.rglob("*") if p.is_file()):
            name = path.relative_to(hub.folder).as_posix()
            siblings.append({"rfilename": name, "size": hub.declared.get(name, path.stat().st_size)})
        self._send(json.dumps({"id": hub.repo_id, "sha": COMMIT, "siblings": siblings}).encode(), "application/json")

    def _send_file(self, revision: str, name: str, body: bool) -> None:
        hub, path = self.server, self.server.folder / name
        if revision not in ("main", COMMIT) or not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        data = path.read_bytes()
        wanted = self.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted.startswith("bytes=") else 0
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        rest = data[start:]
        if hub.stall_after and len(rest) > hub.stall_after:
            self.wfile.write(rest[: hub.stall_after])
            self.wfile.flush()
            hub.stalled.set()
            hub.go_on.wait(60)
            rest = rest[hub.stall_after :]
        self.wfile.write(rest)

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serving(repo_id: str, folder: Path) -> Iterator[Hub]:
    """A hub in a thread of its own."""
    hub = Hub(repo_id, folder)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        hub.shutdown()
        hub.server_close()
