"""Proves, while a store is opened, that it honours the one guarantee everything rests on."""

from __future__ import annotations

import random

from ...errors import StorageError
from ..protocol import names
from .base import CheckpointStore, Created


async def probe_conditional_create(store: CheckpointStore, rng: random.Random) -> None:
    """Create one object twice; the second try must be refused and leave the first bytes alone.

    Raises:
        StorageError: the store ignored the condition. On such a store two coordinators could both
            complete a checkpoint, and a job would lose or repeat records.
    """
    name = names.probe(f"{rng.getrandbits(128):032x}")
    first, second = b'{"probe":1}', b'{"probe":2}'
    try:
        created = await store.create_if_absent(name, first)
        repeated = await store.create_if_absent(name, second)
        kept = await store.read(name)
    finally:
        await store.delete(name)
    if not isinstance(created, Created):
        raise _unsafe(store, "it says that a new object had existed already")
    if isinstance(repeated, Created) or kept != first:
        raise _unsafe(store, "it ignored the condition and overwrote an object")
    if repeated.data != first:
        raise _unsafe(store, "it does not return what was last written")


def _unsafe(store: CheckpointStore, why: str) -> StorageError:
    return StorageError(
        f"this store cannot hold checkpoints: create-if-absent does not work on it, {why}",
        where=store.describe(),
        fix="use a store that honours `If-None-Match: *` on PutObject (Amazon S3, MinIO since 2024-11, "
        "Cloudflare R2), check that no proxy in between strips the header, or use a directory",
    )
