"""The secret of a coordinator, kept in the storage where strangers cannot read it.

Whoever has the token commands the job, and can run code in its processes. So it is written only where the
storage itself keeps others out, as a file that only its user reads, or if the option
`headgate.control.token-in-storage` says so. Each generation has a record of its own: a coordinator that was
replaced and comes late cannot put its token in the place of its successor's.
"""

from __future__ import annotations

import msgspec

from ...errors import StorageError
from ..protocol import names
from .base import CheckpointStore


class _ControlToken(msgspec.Struct, frozen=True):
    token: str


async def publish_token(
    store: CheckpointStore, generation: int, token: str, *, in_any_storage: bool
) -> None:
    """Keep the token of the leader of `generation`.

    Args:
        store: of the job.
        generation: that leads.
        token: its secret.
        in_any_storage: also where everybody who reads the storage can read it.

    Raises:
        StorageError: it cannot be written.
    """
    name = names.control_token(generation)
    data = msgspec.json.encode(_ControlToken(token))
    if not await store.put_private(name, data) and in_any_storage:
        await store.put(name, data)


async def withdraw_token(store: CheckpointStore, generation: int) -> None:
    """Delete the token of a generation that leads no more. That there is none is fine."""
    if generation:
        await store.delete(names.control_token(generation))


async def read_token(store: CheckpointStore, generation: int) -> str:
    """The token of the leader of `generation`; empty: it is not there, or this user may not read it."""
    try:
        data = await store.read(names.control_token(generation))
        return "" if data is None else msgspec.json.decode(data, type=_ControlToken).token
    except (StorageError, msgspec.DecodeError):
        return ""
