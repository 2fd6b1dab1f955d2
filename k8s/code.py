"""`headgate k8s fetch-code` unpacks the zip file of `kubernetes.code.archive` onto the module path.

It runs in an init container, before anything that imports the job's code. A zip file is not trusted:
nothing is written outside the directory, no links are made, and the unpacked size is bounded.
"""

from __future__ import annotations

import asyncio
import lzma
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from ..errors import CorruptError, UsageError
from ..operators.sizes import format_size
from ..runtime.options.execution import CODE_SIZE
from ..runtime.options.registry import Options
from ..runtime.storage.open_store import open_store_at

FILES_MAX: Final = 65_535
"""The limit of a zip file without the extension Zip64."""
_CHUNK_BYTES: Final = 1 << 20
_ENCRYPTED: Final = 1
_DAMAGES: Final = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, ValueError,
)  # fmt: skip
"""The exceptions that Python's zipfile raises for damaged files."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The number and the bytes of the unpacked files."""

    files: int
    size_bytes: int


async def fetch_code(address: str, target: Path, options: Mapping[str, str]) -> Unpacked:
    """Put the content of a zip file into the directory `target`, and nothing else.

    Existing files are deleted first, such as those that an earlier attempt left.

    Args:
        address: of the zip file, such as `s3://bucket/code/clicks-7.zip`, or a path.
        options: the options of the job, such as those of S3, and `headgate.code.size-max`.

    Raises:
        UsageError: the file does not exist, is not a zip file, or must not be unpacked.
        CorruptError: the file is damaged.
        StorageError: the storage cannot be read.
    """
    size_max = Options({CODE_SIZE.key: options[CODE_SIZE.key]} if CODE_SIZE.key in options else {})
    with tempfile.TemporaryDirectory(prefix="headgate-code-") as directory:
        archive = Path(directory) / "code.zip"
        await _download(address, archive, options, size_max.get(CODE_SIZE))
        return await asyncio.to_thread(unpack, archive, target, size_max.get(CODE_SIZE), address)


async def _download(address: str, to: Path, options: Mapping[str, str], size_max: int) -> None:
    """Copy one object of the storage into a local file."""
    folder, _, name = address.rpartition("/")
    if not folder or not name:
        raise UsageError(
            f"this is not the address of a zip file address=`{address}`",
            fix="write s3://bucket/folder/name.zip, or the path of a file on a mounted volume",
        )
    store = open_store_at(folder, options)
    await store.open(writable=False)
    try:
        sizes = {found: size async for found, size in store.list_files(name)}
        if name not in sizes:
            raise UsageError(
                f"the zip file of kubernetes.code.archive does not exist address=`{address}`",
                fix="upload it, or correct the address",
            )
        _check_size(sizes[name], size_max, address)
        await store.download(name, to)
    finally:
        await store.close()


def unpack(archive: Path, target: Path, size_max: int, address: str) -> Unpacked:
    """Unpack a zip file into the directory `target`, which is emptied first.

    Args:
        size_max: the most bytes that its files may have together.
        address: names the archive in errors.

    Raises:
        UsageError, CorruptError: see `fetch_code`.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = _checked(opened.infolist(), size_max, address)
            _empty(target)
            written = 0
            for path, member in members.items():
                written += _write(opened, member, target / path, size_max - written, address)
            return Unpacked(len(members), written)
    except _DAMAGES as error:
        raise CorruptError(
            f"the archive is not a zip file, or is damaged: {error}",
            where=address,
            fix="make it again, for instance with `zip -r code.zip my_package`",
        ) from None
    except (RuntimeError, OSError) as error:
        raise UsageError(f"the archive cannot be unpacked: {error}", where=address) from None


def _checked(
    infos: list[zipfile.ZipInfo], size_max: int, address: str
) -> dict[PurePosixPath, zipfile.ZipInfo]:
    """Return the files of an archive by their paths, if all may be written; directories are left out."""
    if len(infos) > FILES_MAX:
        raise UsageError(
            f"the archive has {len(infos):,} files, more than {FILES_MAX:,}", where=address
        )
    _check_size(sum(info.file_size for info in infos), size_max, address)
    found: dict[PurePosixPath, zipfile.ZipInfo] = {}
    for info in infos:
        path, mode = PurePosixPath(info.filename), info.external_attr >> 16
        # `orig_filename` still has the characters that zipfile replaces: backslashes, and all after a
        # null byte.
        plain = not set("\\\0:") & set(info.orig_filename) and ".." not in path.parts
        if not plain or path.is_absolute() or info.filename == "":
            raise _refused(info, "leads out of its directory, or may do so", address)
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _refused(info, "is a link or a device", address)
        if info.flag_bits & _ENCRYPTED:
            raise _refused(info, "is encrypted", address)
        if info.is_dir():
            continue
        if path in found:
            raise _refused(info, "occurs twice", address)
        found[path] = info
    return found


def _write(
    opened: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, left: int, address: str
) -> int:
    """Write one file. Its bytes are counted, because the size in the archive may be wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with opened.open(member) as source, path.open("xb") as made:
        while chunk := source.read(_CHUNK_BYTES):
            written += len(chunk)
            if written > left:
                raise _refused(member, "is larger than the archive says", address)
            made.write(chunk)
    return written


def _empty(directory: Path) -> None:
    for each in directory.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def _check_size(size: int, size_max: int, address: str) -> None:
    if size > size_max:
        raise UsageError(
            f"the archive has {format_size(size)}, more than {format_size(size_max)}",
            where=address,
            fix=f"put large files into the image, or raise the option {CODE_SIZE.key}",
        )


def _refused(member: zipfile.ZipInfo, why: str, address: str) -> UsageError:
    return UsageError(
        f"the archive was not unpacked: file=`{member.filename}` {why}", where=address
    )
