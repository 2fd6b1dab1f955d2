"""Lines from standard input and sockets, and to sockets."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.connectors import collect, from_list, socket_sink, socket_source, stdin_source
from headgate.connectors import lines as of_lines
from headgate.errors import JobError, SourceError, UsageError
from headgate.operators.elements import ColumnBatch, ObjectBatch
from headgate.runtime.manifest import load_job
from headgate.testing.connectors import make_context


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve one connection, as `nc -l` does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                with server.accept()[0] as connection:
                    answer(connection)
            except OSError:
                return

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def run(source: Any) -> list[Any]:
    out = collect(guarantee="none")
    job = hg.Job("lines")
    job.restart(0)
    job.read(source, name="in").write(out, name="out")
    assert "cannot be read again" in job.explain()
    job.run(cluster="in-process")
    return [row["line"] for row in out.rows]


def test_lines_of_a_socket_in_whatever_parts_they_come() -> None:
    data = "one\r\n\ntwo ä\nlast".encode()

    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(data)):
            connection.sendall(data[at : at + 1])

    with serving(answer) as port:
        assert run(socket_source(port)) == ["one", "", "two ä", "last"]


def test_a_line_without_an_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_lines, "LINE_BYTES_MAX", 1000)
    with (
        serving(lambda connection: connection.sendall(b"x" * 2000)) as port,
        pytest.raises(SourceError, match="longer than"),
    ):
        run(socket_source(port))


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(JobError, match="nothing listens"):
        run(socket_source(port))
    job = hg.Job("lines")
    job.restart(0)
    job.read(from_list([1]), name="in").write(socket_sink(port), name="out")
    with pytest.raises(JobError, match="nothing listens"):
        job.run(cluster="in-process")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.com", ""])
def test_other_machines_are_refused(host: str) -> None:
    for make in (socket_source, socket_sink):
        with pytest.raises(UsageError, match="on one machine"):
            make(9999, host=host)
        with pytest.raises(UsageError, match="port"):
            make(65536)


@pytest.mark.parametrize(
    ("batch", "lines"),
    [
        (ObjectBatch([1, "a\nb"]), ["1", "a b"]),
        (ColumnBatch(pa.RecordBatch.from_pylist([{"x": "a"}, {"x": None}])), ["a", ""]),
        (ColumnBatch(pa.RecordBatch.from_pylist([{"x": "a", "y": 1}])), ['{"x":"a","y":1}']),
    ],
)
def test_a_socket_gets_a_line_for_each_record(batch: Any, lines: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        writer = socket_sink(server.getsockname()[1]).writer()
        writer.open(make_context())
        writer.prepare()
        connection = server.accept()[0]
        writer.write(batch)
        writer.close()
        with connection, connection.makefile() as file:
            assert file.read() == "".join(f"{line}\n" for line in lines)


def test_a_program_that_leaves_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        writer = socket_sink(server.getsockname()[1]).writer()
        writer.open(make_context())
        writer.prepare()
        server.accept()[0].close()
    some = ObjectBatch(["x" * 100_000] * 50)

    def write() -> None:
        for _ in range(50):
            writer.write(some)

    with pytest.raises(JobError, match="cannot be sent"):
        write()
    writer.close()


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "pipe":
        reading, writing = os.pipe()
        os.write(writing, b"one\ntwo\n")
        threading.Timer(0.1, os.close, [writing]).start()
        given = os.fdopen(reading)
    else:
        (tmp_path / "in").write_text("one\ntwo\n")
        given = (tmp_path / "in").open()
    with given:
        monkeypatch.setattr(sys, "stdin", given)
        assert run(stdin_source()) == ["one", "two"]


def test_a_process_without_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open() as nothing:
        for given in (nothing, None):
            monkeypatch.setattr(sys, "stdin", given)
            with pytest.raises(SourceError, match="no standard input") as failed:
                run(stdin_source())
            assert "--cluster in-process" in failed.value.fix


MANIFEST = """
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: lines}}
spec:
  sources:
    words: {{socket: {{port: {port}}}}}
    typed: {{stdin: {{}}}}
  sinks:
    echo: {{from: words, socket: {{port: {port}, host: localhost}}}}
    said: {{from: typed, print: {{}}}}
"""


def test_a_manifest() -> None:
    text = load_job(MANIFEST.format(port=9999)).explain()
    assert "`words` (socket(127.0.0.1:9999)) cannot be read again" in text
    assert "`typed` (stdin()) cannot be read again" in text
    assert "socket(localhost:9999)" in text
    assert stdin_source().replays is False
