"""Savepoints that earlier versions wrote, brought to this machine."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import xxhash

from headgate.tests.support.modules import load

FORMATS = {
    "v0.1": 1,
    "v0.1-format-2": 2,
    "v0.1-format-3": 3,
    "v0.1-format-4": 4,
    "v0.1-format-5": 5,
    "v0.1-format-6": 6,
    "v0.1-format-7": 7,
    "v0.1-format-8": 8,
}
"""By the directory of what is kept: the format of its records."""
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def state_job() -> ModuleType:
    """The job that the savepoints are of."""
    return load(HERE / "state_job.py")


@pytest.fixture(scope="session")
def log_job() -> ModuleType:
    """The job that the logs are of."""
    return load(HERE / "log_job.py")


@pytest.fixture(scope="session")
def in_flight_job() -> ModuleType:
    """The job whose checkpoints are kept with records on their way in them."""
    return load(HERE / "in_flight_job.py")


class Kept:
    """A copy of one kept savepoint, with the input and the drafts that its state names."""

    def __init__(self, version: str, kind: str, directory: Path) -> None:
        source = HERE / version
        paths = json.loads((source / "paths.json").read_text())
        shutil.copytree(source / "input", directory / "input")
        for file in (directory / "input").iterdir():
            os.utime(file, ns=(paths["changed_ns"], paths["changed_ns"]))
        shutil.copytree(source / kind, directory / kind)
        self.mark = version
        self.directory = directory
        self.savepoint = directory / kind / "savepoint"
        self.output = directory / kind / "output"
        self.expected: dict[str, list[Any]] = json.loads((source / "expected.json").read_text())
        self._move(paths["directory"], str(directory))

    def _move(self, before: str, now: str) -> None:
        """Positions and pending files have whole paths: put this machine's in their place."""
        path = self.savepoint / "_metadata"
        metadata = json.loads(path.read_text())
        pieces = [
            handle
            for operator in metadata["manifest"]["operators"]
            for subtask in operator["subtasks"]
            for snapshot in subtask["snapshots"]
            for handle in snapshot["handles"]
            if handle["kind"] == "items"
        ]
        moved = 0
        for handle in pieces:
            data = base64.b64decode(handle["inline"])
            new = with_paths(data, before, now)
            moved += new != data
            handle["inline"] = base64.b64encode(new).decode()
            handle["size_bytes"] = len(new)
            handle["checksum"] = xxhash.xxh3_64_hexdigest(new)
        assert moved == 4, "both splits, and what both subtasks of the sink have pending"
        path.write_bytes(sealed(metadata))


def sealed(record: dict[str, Any]) -> bytes:
    """The bytes of a record in the format that it says, with the checksum of what it is now."""
    if "format" not in record:
        return msgspec.json.encode(record)
    head = f'{{"format":{record.pop("format")},"checksum":"'.encode()
    del record["checksum"]
    rest = b'",' + msgspec.json.encode(record)[1:]
    return head + xxhash.xxh3_64_hexdigest(head + rest).encode() + rest


def with_paths(value: Any, before: str, now: str) -> Any:
    """A value with other paths in its texts, also in msgpack within it."""
    if isinstance(value, str):
        return value.replace(before, now)
    if isinstance(value, list):
        return [with_paths(one, before, now) for one in value]
    if isinstance(value, dict):
        return {key: with_paths(one, before, now) for key, one in value.items()}
    if isinstance(value, bytes) and before.encode() in value:
        return msgspec.msgpack.encode(with_paths(msgspec.msgpack.decode(value), before, now))
    return value


@pytest.fixture
def formats() -> dict[str, int]:
    """The format of the records, by the directory of what is kept."""
    return FORMATS


@pytest.fixture(params=FORMATS)
def version(request: pytest.FixtureRequest) -> str:
    """Each version of the format that savepoints are kept of."""
    return str(request.param)


@pytest.fixture(params=["canonical", "native"])
def kept(request: pytest.FixtureRequest, version: str, tmp_path: Path) -> Kept:
    """Each savepoint of it."""
    return Kept(version, request.param, tmp_path)


@pytest.fixture
def canonical(version: str, tmp_path: Path) -> Kept:
    """The canonical one."""
    return Kept(version, "canonical", tmp_path)
