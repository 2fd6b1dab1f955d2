"""`headgate k8s fetch-code`: the code of a job is unpacked, and nothing is written beside its directory."""

from __future__ import annotations

import asyncio
import io
import json
import random
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headgate.errors import CorruptError, HeadgateError, UsageError
from headgate.k8s.cli import app
from headgate.k8s.code import FILES_MAX, fetch_code, unpack
from headgate.runtime.storage.open_store import open_store_at
from headgate.tests.conftest import S3Server
from headgate.tests.k8s.conftest import RESOURCE

SIZE_MAX = 1 << 20
PACKAGE = {
    "clicks/__init__.py": b"from .steps import answer\n",
    "clicks/steps.py": b"answer = 42\n",
    "clicks/data/words.txt": b"a b c",
    "tool.py": b"",
}


def zipped(files: dict[str, bytes], *infos: tuple[zipfile.ZipInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        for info, data in infos:
            archive.writestr(info, data)
    return made.getvalue()


def files(top: Path) -> dict[str, bytes]:
    return {
        path.relative_to(top).as_posix(): path.read_bytes()
        for path in top.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The directory on the module path, within one that must stay as it is."""
    made = tmp_path / "around" / "code"
    made.mkdir(parents=True)
    return made


def unpacked(data: bytes, target: Path, size_max: int = SIZE_MAX) -> dict[str, bytes]:
    archive = target.parent.parent / "code.zip"
    archive.write_bytes(data)
    unpack(archive, target, size_max, "s3://bucket/code.zip")
    assert list(target.parent.iterdir()) == [target]
    return files(target)


def test_a_package_is_unpacked_and_can_be_imported(target: Path) -> None:
    assert unpacked(zipped(PACKAGE), target) == PACKAGE
    ask = "import clicks; print(clicks.answer)"
    environment = {"PYTHONPATH": str(target)}
    ran = subprocess.run(
        [sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "42\n"


def test_what_an_earlier_attempt_left_is_gone(target: Path) -> None:
    (target / "clicks").mkdir()
    (target / "clicks" / "old.py").write_text("")
    (target / "link").symlink_to(target.parent)
    assert unpacked(zipped(PACKAGE), target) == PACKAGE
    assert target.parent.is_dir()


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    "data",
    [
        zipped({"../evil.py": b"x"}),
        zipped({"clicks/../../evil.py": b"x"}),
        zipped({"/etc/evil.py": b"x"}),
        zipped({"..\\evil.py": b"x"}),
        zipped({"C:/evil.py": b"x"}),
        zipped({}, (link("out"), b"/etc")),
        zipped({}, (link("out"), b".."), (zipfile.ZipInfo("out/evil.py"), b"x")),
    ],
)
def test_what_leads_out_of_the_directory_is_refused_before_anything_is_written(
    target: Path, data: bytes
) -> None:
    (target / "kept.py").write_text("")
    with pytest.raises(UsageError, match="was not unpacked"):
        unpacked(data, target)
    assert files(target) == {"kept.py": b""}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_is_there_twice_is_refused(target: Path) -> None:
    twice = zipped({"a.py": b"1"}, (zipfile.ZipInfo("./a.py"), b"2"))
    with pytest.raises(UsageError, match="twice"):
        unpacked(twice, target)
    with pytest.raises(UsageError, match="cannot be unpacked"):
        unpacked(zipped({"a": b"1", "a/b.py": b"2"}), target)


def test_the_size_is_bounded_and_not_believed(target: Path) -> None:
    bomb = zipped({"zeros": b"\0" * (4 * SIZE_MAX)})
    assert len(bomb) < SIZE_MAX // 100
    with pytest.raises(UsageError, match=r"headgate\.code\.size-max"):
        unpacked(bomb, target)
    # The directory of the archive says that the file is small.
    says = (4 * SIZE_MAX).to_bytes(4, "little")
    lying = bomb.replace(says, (10).to_bytes(4, "little"))
    assert lying != bomb
    with pytest.raises(HeadgateError):
        unpacked(lying, target)
    assert sum(map(len, files(target).values())) <= SIZE_MAX
    assert unpacked(zipped({"x": b"1" * SIZE_MAX}), target)


def test_the_number_of_files_is_bounded(target: Path) -> None:
    with pytest.raises(UsageError, match="more than 65,535"):
        unpacked(zipped({f"{n}": b"" for n in range(FILES_MAX + 1)}), target)


def test_damaged_and_other_files_are_told(target: Path) -> None:
    whole = zipped({"a.py": bytes(random.Random(1).randbytes(5000))})
    at = len(whole) // 2
    damaged = whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :]
    for data in (damaged, whole[:-30], b"", b"#!/bin/sh\n"):
        with pytest.raises(CorruptError, match="not a zip file, or is damaged"):
            unpacked(data, target)


def test_random_damage_never_writes_beside_the_directory(target: Path) -> None:
    whole = zipped(PACKAGE)
    chance = random.Random(7)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            unpacked(bytes(data), target)
        except HeadgateError:
            assert list(target.parent.iterdir()) == [target]


def test_an_archive_in_s3_or_on_a_volume(s3_server: S3Server, target: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    spec = {**RESOURCE["spec"], "options": s3_server.options}
    manifest.write_text(json.dumps({**RESOURCE, "spec": spec}))
    local = tmp_path / "clicks-7.zip"
    local.write_bytes(zipped(PACKAGE))

    async def upload() -> None:
        store = open_store_at(f"s3://{s3_server.bucket}/code", s3_server.options)
        await store.open(writable=False)
        await store.put("clicks-7.zip", zipped(PACKAGE))
        await store.close()

    asyncio.run(upload())
    address = f"s3://{s3_server.bucket}/code/clicks"
    command = ["--to", str(target), "--job", str(manifest)]
    for each in (f"{address}-7.zip", str(local), f"file://{local}"):
        done = CliRunner().invoke(app, ["fetch-code", each, *command])
        assert done.exit_code == 0, done.output
        assert "unpacked 4 files" in done.output
        assert files(target) == PACKAGE
    missing = CliRunner().invoke(app, ["fetch-code", f"{address}-8.zip", *command])
    assert missing.exit_code == 2
    assert "does not exist" in missing.output
    small = {**s3_server.options, "headgate.code.size-max": "10 b"}
    with pytest.raises(UsageError, match="more than 10"):
        asyncio.run(fetch_code(f"{address}-7.zip", target, small))


@pytest.mark.parametrize("address", ["code.zip", "s3://bucket/", "ftp://host/code.zip", "s3://"])
def test_a_wrong_address_is_told(target: Path, address: str) -> None:
    with pytest.raises(UsageError):
        asyncio.run(fetch_code(address, target, {}))
