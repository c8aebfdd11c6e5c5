"""A Hub on the loopback interface: what huggingface_hub needs of it, with faults on demand.

with FakeHub() as hub:
    hub.add("org/name", directory)           files of over 100 bytes that end in .safetensors or .gguf are "LFS"
    hub.faults.append(Fault("model-2", status=503, retry_after=0))
    hub.url, hub.requests, hub.uploads
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS = (".safetensors", ".gguf")
COMMIT = "c0ffee" + "0" * 34


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose path contains `path`.

    status, retry_after  answer with this status
    cut                  close the connection after so many bytes of a body
    """

    path: str
    status: int = 0
    retry_after: int | str | None = None
    cut: int = -1
    method: str = "GET"
    times: int = 1


@dataclass
class Request:
    """A request that was answered: `start` is the first byte of its range, `sent` the bytes of its body."""

    method: str
    path: str
    start: int = 0
    sent: int = 0
    token: str = ""


@dataclass
class Repo:
    """A repository: its files by name, and hashes that differ from those of the files."""

    files: dict[str, Path] = field(default_factory=dict)
    claimed: dict[str, str] = field(default_factory=dict)
    revisions: set[str] = field(default_factory=lambda: {"main", COMMIT})
    gated: bool = False
    private: bool = False


class FakeHub:
    """The server. `bytes_per_second` slows down bodies; `uploads` has what was committed: contents by name."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.bytes_per_second = 0
        self.stored: dict[str, bytes] = {}
        self.uploads: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self._hashes: dict[tuple[Path, float], str] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.cdn = self.url.replace("127.0.0.1", "localhost")  # another host, as the real one has

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, directory: Path) -> Repo:
        """A repository with the files of a directory."""
        files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
        self.repos[name] = Repo(files)
        return self.repos[name]

    def sha256(self, path: Path) -> str:
        key = path, path.stat().st_mtime
        if key not in self._hashes:
            digest = hashlib.sha256()
            with open(path, "rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            self._hashes[key] = digest.hexdigest()
        return self._hashes[key]

    def sent(self, part: str) -> int:
        """Bytes that were sent of files whose path contains a text."""
        return sum(request.sent for request in self.requests if part in request.path)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests read `requests`."""

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        self.request_record = Request(self.command, path, token=self.headers.get("Authorization", ""))
        self.hub.requests.append(self.request_record)
        fault = next((f for f in self.hub.faults if f.path in path and f.method == self.command and f.times), None)
        self.cut = -1
        if fault is not None:
            fault.times -= 1
            if fault.status:
                headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
                self._answer(fault.status, b"", headers)
                return
            self.cut = fault.cut
        self._route(path, body)

    def _route(self, path: str, body: bytes) -> None:
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/.*", path):
            return self._preupload(json.loads(body))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/.*", path):
            return self._commit(found[1], body)
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._batch(json.loads(body))
        if found := re.fullmatch(r"/upload/(\w+)", path):
            self.hub.stored[found[1]] = body
            return self._answer(200, b"", {})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.*))?", path):
            return self._info(found[1], found[2] or "main")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path):
            return self._tree(found[1], found[2])
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(refs/pr/\d+|[^/]+)/(.*)", path):
            return self._resolve(found[1], found[2], found[3])
        if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.*)", path):
            return self._file(self.hub.repos[found[1]].files[found[2]], {})
        return self._error(404, "")

    # ------------------------------------------------------------------------------------------------------ reading

    def _repo(self, name: str, revision: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self.request_record.token):
            self._error(401 if repo is None else 404, "RepoNotFound")
        elif repo.gated and not self.request_record.token:
            self._error(403, "GatedRepo")
        elif revision not in repo.revisions:
            self._error(404, "RevisionNotFound")
        else:
            return repo
        return None

    def _entry(self, repo: Repo, name: str) -> dict[str, Any]:
        path = repo.files[name]
        entry: dict[str, Any] = {"size": path.stat().st_size}
        if name.endswith(LFS):
            digest = repo.claimed.get(name) or self.hub.sha256(path)
            entry["lfs"] = {"sha256": digest, "oid": digest, "size": entry["size"], "pointerSize": 130}
        data = path.read_bytes() if entry["size"] < 1 << 20 else b""
        git_id = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return entry | {"blobId": git_id, "oid": git_id}

    def _info(self, name: str, revision: str) -> None:
        if repo := self._repo(name, revision):
            siblings = [{"rfilename": file} | self._entry(repo, file) for file in repo.files]
            self._json({"id": name, "sha": COMMIT, "siblings": siblings})

    def _tree(self, name: str, revision: str) -> None:
        if repo := self._repo(name, revision):
            self._json([{"type": "file", "path": file} | self._entry(repo, file) for file in repo.files])

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo = self._repo(name, revision)
        if repo is None:
            return
        if file not in repo.files:
            return self._error(404, "EntryNotFound")
        entry, headers = self._entry(repo, file), {"X-Repo-Commit": COMMIT}
        if "lfs" in entry:
            headers |= {"X-Linked-Etag": f'"{entry["lfs"]["sha256"]}"', "X-Linked-Size": str(entry["size"])}
            self._answer(302, b"", headers | {"Location": f"{self.hub.cdn}/cdn/{name}/{file}"})
        else:
            self._file(repo.files[file], headers | {"ETag": f'"{entry["blobId"]}"'})

    def _file(self, path: Path, headers: dict[str, str]) -> None:
        size = path.stat().st_size
        first, last, status = 0, size - 1, 200
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last, status = int(found[1]), min(int(found[2] or size), size - 1), 206
            headers = headers | {"Content-Range": f"bytes {first}-{last}/{size}"}
        self.request_record.start = first
        self._answer(status, (path, first, last + 1 - first), headers | {"Accept-Ranges": "bytes"})

    # ------------------------------------------------------------------------------------------------------ uploads

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repos:
            return self._error(409, "")
        self.hub.repos[name] = Repo(private=wanted.get("visibility") == "private")
        self._json({"url": f"{self.hub.url}/{name}"})

    def _preupload(self, wanted: dict[str, Any]) -> None:
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LFS) else "regular", "shouldIgnore": False}
            for f in wanted["files"]
        ]
        self._json({"files": modes, "commitOid": COMMIT})

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for one in wanted["objects"]:
            action = {"upload": {"href": f"{self.hub.url}/upload/{one['oid']}", "header": {}}}
            objects.append(one | ({} if one["oid"] in self.hub.stored else {"actions": action}))
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.hub.uploads[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.uploads[value["path"]] = self.hub.stored[value["oid"]]
        is_pr = "create_pr=1" in self.path
        self.hub.commits.append({"repo": name, "is_pr": is_pr, **lines[0]["value"]})
        link = {"pullRequestUrl": f"{self.hub.url}/{name}/discussions/1"} if is_pr else {}
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT, **link})

    # ------------------------------------------------------------------------------------------------------ answers

    def _error(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code} if code else {})

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes | tuple[Path, int, int], headers: dict[str, str]) -> None:
        self.send_response(status)
        length = len(body) if isinstance(body, bytes) else body[2]
        for name, value in (headers | {"Content-Length": str(length)}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            if isinstance(body, bytes):
                self._send(body)
                return
            with open(body[0], "rb") as file:
                file.seek(body[1])
                while length and self.cut:
                    block = file.read(min(1 << 16, length, self.cut if self.cut > 0 else length))
                    self._send(block)
                    length -= len(block)
                    self.cut -= len(block) if self.cut > 0 else 0
                    if self.hub.bytes_per_second:
                        time.sleep(len(block) / self.hub.bytes_per_second)
            if length:
                self.close_connection = True
        except OSError:  # the client is gone
            self.close_connection = True

    def _send(self, data: bytes) -> None:
        self.wfile.write(data)
        self.request_record.sent += len(data)
