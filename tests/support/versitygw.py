"""versitygw, a real S3 server over a directory, built with Go once and kept outside of the tree.

It looks whether an object is there and then writes it, in two steps, so it gives one name to two writers
that create it at once: a store of the kind that headgate must refuse.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from headgate.tests.support.built import go_command, made_once

VERSION = "v1.7.0"
MODULE = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
BUILD_S_MAX = 600
START_S_MAX = 60
ACCESS, SECRET = "testing", "testing"
"""Those of the other S3 servers of tests, since boto3 keeps the first that a process has used."""
BUCKET = "bucket"


def binary() -> Path:
    """The path of the server, which is built if it is not there yet.

    Raises:
        NotAvailableError: there is no Go, no network, or not enough time.
    """
    return made_once(f"versitygw-{VERSION}", ["versitygw"], _build) / "versitygw"


def _build(directory: Path) -> None:
    go_command("install", MODULE, seconds_max=BUILD_S_MAX, GOBIN=str(directory))


@contextlib.contextmanager
def running(directory: Path) -> Iterator[str]:
    """A server over `directory`, with an empty bucket, for the time of the block; yields its address.

    Raises:
        NotAvailableError: see `binary`.
    """
    server = binary()
    (directory / BUCKET).mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    log = directory.parent / "versitygw.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(str(server), "--quiet", "--port", f"127.0.0.1:{port}"),
                *("--access", ACCESS, "--secret", SECRET, "posix", str(directory)),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_for_answer(process, endpoint, log)
        yield endpoint
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_answer(process: subprocess.Popen[bytes], endpoint: str, log: Path) -> None:
    """An answer of S3, and be it a refusal, says that the server is there."""
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{endpoint}/{BUCKET}", timeout=5).close()
            return
        except urllib.error.HTTPError as error:
            if b"<Error>" in error.read():
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise RuntimeError(f"versitygw did not start: {log.read_text(errors='replace')[-2000:]}")
