"""Resolves a user's address of a savepoint or checkpoint.

`PATH` is the directory of a savepoint, or that of a job's checkpoints, of which the newest is used;
`PATH@7` is checkpoint number 7 in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...errors import StateError, UsageError
from ...operators.clock import Clock
from ..protocol import names
from ..protocol.checkpoints.manifest import Manifest
from ..protocol.joblog import LogView
from ..storage.base import AddressOpener, CheckpointStore
from ..storage.joblog_store import JobLog
from ..storage.open_store import join_address
from . import store as savepoints
from .store import Savepoint

_FIX = "give the directory of a savepoint (it has `_metadata`), or of a job's checkpoints (it has `log`)"
_WITH_ID = re.compile(r"(?P<path>.+)@(?P<id>\d+)")


class StoredSnapshot(msgspec.Struct, frozen=True):
    """State that a run may start from.

    Attributes:
        manifest: its manifest.
        root: address of the directory that names of files are relative to.
        job: the job that it was taken of.
        savepoint: None if it is a checkpoint.
    """

    manifest: Manifest
    root: str
    job: str
    savepoint: Savepoint | None

    @property
    def text(self) -> str:
        """Describe it for a person."""
        kind = "checkpoint" if self.savepoint is None else "savepoint"
        return f"{kind} {self.manifest.checkpoint_id} in {self.root}"


async def locate(
    open_at: AddressOpener, address: str, options: Mapping[str, str], clock: Clock
) -> StoredSnapshot:
    """Find the state at `address`, without writing.

    Raises:
        StateError: there is no restorable state.
        UsageError: the address is malformed.
    """
    root, wanted = split_address(address)
    async with savepoints.opened(open_at, root, options, writable=False) as store:
        return await find_snapshot(store, root, wanted, clock)


def split_address(address: str) -> tuple[str, int | None]:
    """Return the root of an address and the id of the checkpoint in it, if it names one.

    Raises:
        StateError: the root is a local directory that does not exist.
    """
    match = _WITH_ID.fullmatch(address)
    root, wanted = (match["path"], int(match["id"])) if match else (address, None)
    if "://" not in root and not Path(root).is_dir():
        raise StateError(f"no such directory path=`{root}`", fix=_FIX)
    return root, wanted


async def find_snapshot(
    store: CheckpointStore, root: str, wanted: int | None, clock: Clock
) -> StoredSnapshot:
    """Find the state in an open store, as `locate`."""
    savepoint = await savepoints.read(store)
    if savepoint is None:
        if await savepoints.unfinished_files(store, root) is not None:
            raise StateError(
                savepoints.UNFINISHED,
                where=store.describe(),
                fix="wait for it, or restore another one; headgate savepoint dispose --unfinished "
                "deletes its remains",
            )
        manifest = await _checkpoint(store, wanted, clock)
        return StoredSnapshot(manifest, root, _job_name(root), None)
    if wanted is not None:
        raise UsageError(
            f"a savepoint has no numbered checkpoints path=`{root}`", fix=f"leave out @{wanted}"
        )
    return StoredSnapshot(savepoint.manifest, root, savepoint.job, savepoint)


async def _checkpoint(store: CheckpointStore, wanted: int | None, clock: Clock) -> Manifest:
    view: LogView = await JobLog(store, "reader", clock).load()
    where = store.describe()
    if view.empty:
        raise StateError("neither a savepoint nor the checkpoints of a job", where=where, fix=_FIX)
    manifests = {logged.checkpoint_id: logged.manifest for logged in view.checkpoints}
    if not manifests:
        raise StateError("the job has no completed checkpoint", where=where)
    if wanted is None:
        return manifests[max(manifests)]
    if wanted not in manifests:
        known = ", ".join(map(str, manifests))
        raise StateError(
            f"no such checkpoint id=`{wanted}`", where=where, fix=f"those that are kept: {known}"
        )
    return manifests[wanted]


def _job_name(root: str) -> str:
    """Return the job whose checkpoints are there: its directory has its name (`names.job_dir`)."""
    return root.rstrip("/").rpartition("/")[2]


def savepoint_address(target: str, job: str, token: str) -> str:
    """Return the address of a new savepoint of `job` below the address `target`.

    Raises:
        UsageError: there is no address.
    """
    return join_address(target, names.savepoint_dir(job, token))
