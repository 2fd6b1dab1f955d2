"""versitygw, a real S3 server over a directory, built with Go once and kept outside of the tree.

It checks whether an object exists and then writes it, in two steps. So it gives one name to two writers
that create it at the same time, as no store of a job may do.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

from .process import LocalServer, ServerProcess, runs
from .programs import go_command, made_once

VERSION = "v1.7.0"
MODULE = f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"
BUILD_S_MAX = 600
ACCESS, SECRET = "testing", "testing"
"""The credentials of all S3 servers of tests, as boto3 keeps the first ones that a process has used."""
BUCKET = "bucket"


def binary() -> Path:
    """Return the path of the server, which is built if necessary.

    Raises:
        NotAvailableError: there is no Go, no network, or not enough time.
    """
    return made_once(f"versitygw-{VERSION}", ["versitygw"], _build) / "versitygw"


def _build(directory: Path) -> None:
    go_command("install", MODULE, seconds_max=BUILD_S_MAX, GOBIN=str(directory))


class S3Gateway(LocalServer):
    """A server on loopback over a directory, with the bucket `BUCKET`.

    Attributes:
        port: its port on 127.0.0.1.
        endpoint: its address for clients.
    """

    def __init__(self, directory: Path) -> None:
        """Prepare a server; `start` starts it.

        Args:
            directory: for its objects; created. Its log is beside it.

        Raises:
            NotAvailableError: see `binary`.
        """
        program = binary()
        (directory / BUCKET).mkdir(parents=True)
        super().__init__()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process = ServerProcess(
            "versitygw",
            [
                *(str(program), "--quiet", "--port", f"127.0.0.1:{self.port}"),
                *("--access", ACCESS, "--secret", SECRET, "posix", str(directory)),
            ],
            directory.parent / "versitygw.log",
            lambda: _answers(self.endpoint),
        )


running = runs(S3Gateway)
"""Runs a server for the time of a block; its arguments and errors are those of `S3Gateway`."""


def _answers(endpoint: str) -> bool:
    """Return True if S3 answers, even if it refuses the request."""
    try:
        urllib.request.urlopen(f"{endpoint}/{BUCKET}", timeout=5).close()
    except urllib.error.HTTPError as error:
        return b"<Error>" in error.read()
    return True
