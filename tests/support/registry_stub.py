"""A schema registry in this process, with the API of Confluent's as far as the tests need it."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class RegistryStub:
    """The schemas, and what the registry was asked.

    Attributes:
        asked: method and path of all requests.
        authorization: the header that a request must have; None: none.
        trouble: called with the path of each request before it is answered. It may sleep, or return a
            status and a body to answer with.
    """

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.authorization: str | None = None
        self.trouble: Callable[[str], tuple[int, bytes] | None] = lambda path: None
        self._schemas: dict[int, dict[str, Any]] = {}
        self._versions: dict[str, list[int]] = {}

    def add(self, subject: str, schema: Any, kind: str = "AVRO", references: Any = ()) -> int:
        """Register a schema, and return its id; the same one keeps its id."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        entry = {"schema": text, "schemaType": kind, "references": list(references)}
        known = [id for id, each in self._schemas.items() if each == entry]
        id = known[0] if known else len(self._schemas) + 1
        self._schemas[id] = entry
        versions = self._versions.setdefault(subject, [])
        if id not in versions:
            versions.append(id)
        return id

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and what is answered."""
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        missing = (404, {"error_code": 40401, "message": "not found"})
        if parts[:2] == ["schemas", "ids"]:
            found = self._schemas.get(int(parts[2]))
            return missing if found is None else (200, found)
        versions = self._versions.get(parts[1])
        if method == "POST":
            kind = body.get("schemaType", "AVRO")
            if len(parts) == 3:
                return 200, {"id": self.add(parts[1], body["schema"], kind)}
            known = [
                id
                for id in versions or ()
                if json.loads(self._schemas[id]["schema"]) == json.loads(body["schema"])
            ]
            return (200, {"id": known[0]}) if known else missing
        if not versions:
            return missing
        number = len(versions) if parts[3] == "latest" else int(parts[3])
        id = versions[number - 1]
        return 200, {"id": id, "version": number, **self._schemas[id]}


@contextlib.contextmanager
def registry_stub(context: ssl.SSLContext | None = None) -> Iterator[RegistryStub]:
    """Run a stub on loopback for the time of the block, by TLS if a context is given."""
    stub = RegistryStub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            return None

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            stub.asked.append(f"{self.command} {self.path}")
            made = stub.trouble(self.path)
            if made is None and stub.authorization not in (None, self.headers["Authorization"]):
                made = 401, b'{"message": "who are you?"}'
            if made is None:
                status, found = stub.answer(self.command, self.path, json.loads(body or b"{}"))
                made = status, json.dumps(found).encode()
            with contextlib.suppress(OSError):  # the client has gone
                self.send_response(made[0])
                self.send_header("Content-Length", str(len(made[1])))
                self.end_headers()
                self.wfile.write(made[1])

        do_GET = do_POST = handle_any

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            return None

    server = Server(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "http" if context is None else "https"
    stub.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
