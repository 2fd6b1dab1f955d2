"""Verifies the state files of savepoints and checkpoints, and finds files that none of them needs.

Nothing is changed, so the job may run meanwhile. A checkpoint that the job drops while its files are read
is left out of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import xxhash

from ...errors import MissingFileError
from ...operators.clock import Clock
from ..protocol import names
from ..protocol.checkpoints.manifest import Manifest, orphans, verify
from ..protocol.joblog import LogView
from ..storage.base import AddressOpener, CheckpointStore
from ..storage.joblog_store import JobLog
from ..task.concurrency import all_of
from . import store as savepoints
from .locate import find_snapshot, split_address

READS_MAX: Final = 8
"""Files that are read at once."""
CHUNK_BYTES: Final = 8 << 20
"""Files are read in pieces of at most this size, so that memory does not depend on their size."""


class DamagedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that checkpoints need and that is not as it was written.

    Attributes:
        file: its name below the root.
        damage: `missing`, `truncated`, `too long` or `corrupt`.
        checkpoints: the ids of the checkpoints that need it.
        states: what is in it, as `operator/state`.
        expected_bytes: its size when it was written.
        found_bytes: its size now; None: it is missing.
    """

    file: str
    damage: str
    checkpoints: tuple[int, ...]
    states: tuple[str, ...]
    expected_bytes: int
    found_bytes: int | None


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a verification.

    Attributes:
        kind: `savepoint`, or `checkpoint` for those of a job.
        root: the address of the directory.
        checkpoints: the ids of those that were verified.
        dropped: the ids of those that the job dropped meanwhile; they count no more.
        files: the number of files that they need.
        bytes: the size of these files.
        read: all files were read; else only their names and sizes were compared.
        damaged: files that are not as they were written, by name.
        orphans: files that no checkpoint needs, by name, with their sizes.
    """

    kind: str
    root: str
    checkpoints: tuple[int, ...]
    dropped: tuple[int, ...]
    files: int
    bytes: int
    read: bool
    damaged: tuple[DamagedFile, ...]
    orphans: dict[str, int]


@dataclass(slots=True)
class _File:
    """A file that checkpoints need; `pieces` are the starts, ends and checksums of what they need of it."""

    checkpoints: set[int] = field(default_factory=set)
    states: set[str] = field(default_factory=set)
    pieces: set[tuple[int, int, str]] = field(default_factory=set)

    size: int = 0
    """Its size when it was written. A segment may have pieces that nobody needs any more."""

    @property
    def needed(self) -> int:
        return sum(end - start for start, end, _ in self.pieces)


Progress = Callable[[int, int], None]
"""Takes the bytes that were read so far, and those of all files."""


async def verify_at(
    open_at: AddressOpener,
    address: str,
    options: Mapping[str, str],
    clock: Clock,
    *,
    read: bool = True,
    progress: Progress | None = None,
) -> Verification:
    """Verify a savepoint, all checkpoints that a job retains, or one of them.

    Args:
        open_at: opens the store there.
        address: `PATH` of a savepoint or of a job's checkpoints, or `PATH@7`.
        options: of the store.
        clock: for the job log.
        read: also read every file and compare its checksums.
        progress: is called as bytes are read.

    Raises:
        StateError: there is no savepoint and no completed checkpoint.
        StorageError: the storage cannot be read.
        UsageError: the address is malformed.
    """
    root, wanted = split_address(address)
    async with savepoints.opened(open_at, root, options, writable=False) as store:
        found = await find_snapshot(store, root, wanted, clock)
        if found.savepoint is not None:
            snapshots = await _savepoint(store, found.manifest)
        else:
            snapshots = await _checkpoints(store, wanted, clock)
        damaged = await _damaged(store, snapshots, read, progress)
        retained = {manifest.checkpoint_id for manifest in snapshots.manifests}
        if damaged and found.savepoint is None:
            view = await JobLog(store, "reader", clock).load()
            retained &= {logged.checkpoint_id for logged in view.checkpoints}
    files = _files(each for each in snapshots.manifests if each.checkpoint_id in retained)
    ids = [manifest.checkpoint_id for manifest in snapshots.manifests]
    return Verification(
        kind="checkpoint" if found.savepoint is None else "savepoint",
        root=root,
        checkpoints=tuple(id_ for id_ in ids if id_ in retained),
        dropped=tuple(id_ for id_ in ids if id_ not in retained),
        files=len(files),
        bytes=sum(file.size for file in files.values()),
        read=read,
        damaged=tuple(
            msgspec.structs.replace(file, checkpoints=needed)
            for file in damaged
            if (needed := tuple(id_ for id_ in file.checkpoints if id_ in retained))
        ),
        orphans={name: snapshots.present[name] for name in snapshots.orphans},
    )


@dataclass(frozen=True, slots=True)
class _Snapshots:
    """The target of a verification.

    Attributes:
        manifests: of a savepoint, or of checkpoints.
        present: the sizes of the files in the store, by name.
        orphans: the names of those that no manifest needs.
    """

    manifests: Sequence[Manifest]
    present: Mapping[str, int]
    orphans: Sequence[str]


async def _savepoint(store: CheckpointStore, manifest: Manifest) -> _Snapshots:
    present = {name: size async for name, size in store.list_files("")}
    present.pop(names.SAVEPOINT_METADATA, None)
    return _Snapshots([manifest], present, sorted(present.keys() - manifest.files()))


async def _checkpoints(store: CheckpointStore, wanted: int | None, clock: Clock) -> _Snapshots:
    """All checkpoints that the job retains, with orphans; or the `wanted` one alone."""
    view = await JobLog(store, "reader", clock).load()
    present = {name: size async for name, size in store.list_files(f"{names.CHECKPOINTS}/")}
    manifests = [logged.manifest for logged in view.checkpoints]
    if wanted is None:
        return _Snapshots(manifests, present, orphans(present, view.files, _next(view)))
    return _Snapshots([each for each in manifests if each.checkpoint_id == wanted], present, [])


def _next(view: LogView) -> int:
    """The generation whose files may still become part of a checkpoint; none does of one that ended."""
    return view.generation + 1 if view.ended is not None else view.generation


def _files(manifests: Iterable[Manifest]) -> dict[str, _File]:
    files: dict[str, _File] = {}
    for manifest in manifests:
        for operator in manifest.operators:
            for handle in operator.handles():
                if handle.file is not None:
                    file = files.setdefault(handle.file, _File())
                    file.checkpoints.add(manifest.checkpoint_id)
                    file.states.add(f"{operator.name}/{handle.state}")
                    end = handle.offset + handle.size_bytes
                    file.pieces.add((handle.offset, end, handle.checksum))
                    file.size = max(file.size, names.segment_bytes(handle.file) or end)
    return files


async def _damaged(
    store: CheckpointStore,
    snapshots: _Snapshots,
    read: bool,
    progress: Progress | None,
) -> list[DamagedFile]:
    present = snapshots.present
    files = _files(snapshots.manifests)
    found: dict[str, DamagedFile] = {}

    def note(name: str, damage: str, found_bytes: int | None) -> None:
        found[name] = DamagedFile(
            file=name,
            damage=damage,
            checkpoints=tuple(sorted(files[name].checkpoints)),
            states=tuple(sorted(files[name].states)),
            expected_bytes=files[name].size,
            found_bytes=found_bytes,
        )

    for manifest in snapshots.manifests:
        for problem in verify(manifest, present):
            if problem.found_bytes is None:
                note(problem.file, "missing", None)
            else:
                short = problem.found_bytes < problem.expected_bytes
                note(problem.file, "truncated" if short else "too long", problem.found_bytes)
    sound = sorted(files.keys() - found.keys())
    total = sum(files[name].needed for name in sound)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    async def read_all() -> None:
        for name in left:
            try:
                if not await _is_whole(store, name, files[name].pieces, advance):
                    note(name, "corrupt", present[name])
            except MissingFileError:
                note(name, "missing", None)

    left = iter(sound if read else ())
    await all_of([read_all() for _ in range(READS_MAX)])
    return [found[name] for name in sorted(found)]


async def _is_whole(
    store: CheckpointStore,
    name: str,
    pieces: Iterable[tuple[int, int, str]],
    advance: Callable[[int], None],
) -> bool:
    """Return whether each piece of a file has the checksum with which it was written."""
    for start, end, checksum in sorted(pieces):
        digest, position = xxhash.xxh3_64(), start
        while position < end:
            data = await store.read_range(name, position, min(CHUNK_BYTES, end - position))
            if not data:
                return False
            digest.update(data)
            position += len(data)
            advance(len(data))
        if digest.hexdigest() != checksum:
            return False
    return True
