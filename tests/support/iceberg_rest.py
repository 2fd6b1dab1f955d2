"""A REST catalog of Iceberg on loopback, in a thread, as far as the sink needs one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.table import CommitTableRequest, StagedTable, Table


class RestCatalog:
    """The tables of a directory.

    Attributes:
        token: the token that clients must have.
        lost: the number of commits of snapshots that succeed and are answered with `lost_status`.
        requests: the requests so far.
    """

    def __init__(self, directory: Path, token: str) -> None:
        self.catalog = SqlCatalog(
            "rest", uri=f"sqlite:///{directory}/rest.db", warehouse=f"file://{directory}/tables"
        )
        self.token = token
        self.lost = 0
        self.lost_status = 500
        self.requests: list[str] = []
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        with self._lock:  # one SQLite database
            self.requests.append(f"{method} {path}")
            try:
                return self._answer(method, path.removeprefix("/v1/").split("/"), body)
            except NoSuchTableError as error:
                return _problem(404, error)
            except (CommitFailedException, TableAlreadyExistsError) as error:
                return _problem(409, error)

    def _answer(self, method: str, path: list[str], body: bytes) -> tuple[int, Any]:
        match method, path:
            case "GET", ["config"]:
                return 200, {"defaults": {}, "overrides": {}}
            case "POST", ["namespaces"]:
                namespace = tuple(json.loads(body)["namespace"])
                self.catalog.create_namespace_if_not_exists(namespace)
                return 200, {"namespace": namespace, "properties": {}}
            case "GET" | "HEAD", ["namespaces", namespace]:
                return (200 if self.catalog.namespace_exists(namespace) else 404), {}
            case "POST", ["namespaces", namespace, "tables"]:
                given = json.loads(body)
                from pyiceberg.partitioning import PartitionSpec
                from pyiceberg.schema import Schema

                staged = self.catalog._create_staged_table(
                    f"{namespace}.{given['name']}",
                    Schema.model_validate(given["schema"]),
                    partition_spec=PartitionSpec.model_validate(given["partition-spec"]),
                )
                return 200, _table(staged)
            case "GET", ["namespaces", namespace, "tables", name]:
                return 200, _table(self.catalog.load_table(f"{namespace}.{name}"))
            case "POST", ["namespaces", namespace, "tables", name]:
                return self._commit(f"{namespace}.{name}", body)
        return 404, {"error": {"message": "no such path", "type": "NotFound", "code": 404}}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        request = CommitTableRequest.model_validate_json(body)
        try:
            table: Table = self.catalog.load_table(name)
        except NoSuchTableError:
            table = StagedTable(
                tuple(name.split(".")), None, None, self.catalog._load_file_io(), self.catalog
            )
        done = self.catalog.commit_table(table, request.requirements, request.updates)
        if self.lost and b"add-snapshot" in body:
            self.lost -= 1
            return _problem(self.lost_status, RuntimeError("the answer is lost"))
        return 200, json.loads(done.model_dump_json(by_alias=True))


def _table(table: Table) -> dict[str, Any]:
    metadata = json.loads(table.metadata.model_dump_json(by_alias=True))
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}


def _problem(status: int, error: Exception) -> tuple[int, Any]:
    return status, {"error": {"message": str(error), "type": type(error).__name__, "code": status}}


@contextmanager
def rest_catalog(directory: Path, token: str) -> Iterator[tuple[RestCatalog, str]]:
    """Run a catalog; give it and its address."""
    rest = RestCatalog(directory, token)

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != f"Bearer {rest.token}":
                status, given = _problem(401, PermissionError("not authorized"))
            else:
                status, given = rest.answer(self.command, self.path, body)
            text = b"" if self.command == "HEAD" else json.dumps(given).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_HEAD = _handle

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield rest, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        rest.catalog.close()
