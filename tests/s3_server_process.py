"""A moto S3 server as a process of its own, with faults that a request can ask for.

Run: `python s3_server_process.py PORT [--ignore-conditions]`.

moto checks `If-None-Match` and then writes, in two steps: requests that change something are run one at
a time here, as S3 would order them. `--ignore-conditions` drops the header, like an old store or a proxy.
A test asks for faults by PUTting to /__faults__ a JSON list, used up one per matching request:
`{"method": "PUT", "contains": "log/", "when": "before" | "after", "status": 503 | 0}`;
status 0 closes the connection without an answer.
"""

from __future__ import annotations

import io
import json
import sys
import threading

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple


class QuietHandler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type, message, *args):
        pass


class Server:
    def __init__(self, ignore_conditions: bool) -> None:
        self.app = DomainDispatcherApplication(create_backend_app)
        self.ignore_conditions = ignore_conditions
        self.lock = threading.Lock()
        self.faults: list[dict] = []
        self.seen: list[list[str]] = []

    def __call__(self, environ, start_response):
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        environ["wsgi.input"] = io.BytesIO(body)
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path == "/__faults__":
            return self.control(method, body, start_response)
        self.seen.append([method, path, environ.get("QUERY_STRING", "")])
        if self.ignore_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        fault = self.take_fault(method, path + "?" + environ.get("QUERY_STRING", ""))
        if fault is not None and (fault["when"] == "before" or method == "GET"):
            return fail(fault, environ, start_response)
        if method == "GET":
            return self.app(environ, start_response)
        with self.lock:
            if fault is None:
                return list(self.app(environ, start_response))
            list(self.app(environ, lambda *args: None))
        return fail(fault, environ, start_response)

    def control(self, method, body, start_response):
        if method == "PUT":
            self.faults = json.loads(body)
            self.seen = []
        answer = json.dumps({"faults": self.faults, "seen": self.seen}).encode()
        start_response("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]

    def take_fault(self, method, target):
        for fault in self.faults:
            if fault["method"] == method and fault["contains"] in target:
                self.faults.remove(fault)
                return fault
        return None


def fail(fault, environ, start_response):
    if not fault["status"]:
        environ["werkzeug.socket"].shutdown(2)
        raise ConnectionError("closed on request")
    answer = b"<Error><Code>InternalError</Code><Message>on request</Message></Error>"
    headers = [("Content-Length", str(len(answer))), ("Content-Type", "application/xml")]
    start_response(f"{fault['status']} Fault", headers)
    return [answer]


if __name__ == "__main__":
    run_simple(
        "127.0.0.1",
        int(sys.argv[1]),
        Server("--ignore-conditions" in sys.argv),
        threaded=True,
        request_handler=QuietHandler,
    )
