"""Makes the job log safe on a store that may give one name to two writers.

Some servers carry out create-if-absent in two steps: they check whether the object exists, and then
write it. Two coordinators that create the same object at once may then both get the answer that they
created it, and the later write stays. The probe (`probe.py`) refuses a store on which it sees that,
but it cannot prove that a store never does it. So a coordinator acts on an entry only after two
further checks:

1. It reads the beginning of its entry back. All entries begin with a checksum over their whole
   content, which includes a token unique to the writer: so this tells who won the slot.
2. It checks whether a newer generation has been claimed. A newer coordinator claims first and then
   reads the log, and we write first and then look for a claim. So one of the two sees the other: if
   there is no claim, then every later coordinator finds our entry in its slot and does not write
   there. If there is one, we wait for its start entry: it comes after ours, or in its place.

The store only has to return what was last written. Two risks remain. A claimant that writes nothing
for `CLAIMANT_WAIT_S` counts as dead; if it is not, and its request takes effect only later, then it
may replace an entry that was acted upon. And a write of an older coordinator that takes effect very
late may replace the start entry of a newer one: the log then cannot be read any more, which is an
error.

It costs two small requests per entry: a range of 64 bytes, and a read of an absent object.
"""

from __future__ import annotations

from typing import Final, final

from ...errors import CorruptError
from ..protocol import joblog, names
from .base import CheckpointStore
from .retry import Sleep

HEAD_BYTES: Final = 64
"""The number of bytes at the beginning of an entry, or of a claim, that contain its checksum."""
CLAIMANT_WAIT_S: Final = 60.0
"""The longest wait, in seconds, for the start entry of a coordinator that has claimed a newer
generation."""
POLL_S: Final = 0.5


@final
class ReadBack:
    """Checks entries on the store, unless its create-if-absent is atomic by nature."""

    def __init__(self, store: CheckpointStore, sleep: Sleep) -> None:
        self._store = store
        self._sleep = sleep
        self._dead = 0
        """Claimants up to this generation were waited for in vain."""

    @property
    def needed(self) -> bool:
        """False if the store cannot give one name to two writers."""
        return not self._store.creates_are_atomic

    async def other(self, name: str, data: bytes) -> bytes | None:
        """Return the other content of the object `name`, which we created with `data`; None: it
        holds `data`.

        Raises:
            CorruptError: the object is missing.
            StorageError: the store does not respond.
        """
        if not self.needed:
            return None
        head = data[:HEAD_BYTES]
        if await self._store.read_range(name, 0, len(head)) == head:
            return None
        found = await self._store.read(name)
        if found is None:
            raise CorruptError(
                f"the job log is damaged: an object that was just created is missing name=`{name}`",
                where=self._store.describe(),
                fix="does something else delete objects there? use a store of the job's own",
            )
        return None if found == data else found

    async def settled(self, generation: int, sequence: int, data: bytes) -> bytes | None:
        """Wait until no newer coordinator can put its start entry in the place of ours.

        Args:
            generation: ours.
            sequence: of our entry, which is created.
            data: its bytes.

        Returns:
            The other content of its slot; None: our entry stands, and may be acted upon.

        Raises:
            CorruptError: our entry has replaced the start entry of a newer coordinator.
            StorageError: the store does not respond.
        """
        if not self.needed:
            return None
        name = names.log_entry(sequence)
        while await self._is_claimed(max(generation, self._dead) + 1):
            for _ in range(int(CLAIMANT_WAIT_S / POLL_S)):
                # In this order: a coordinator that has written the next slot no longer writes ours.
                follower = await self._store.read(names.log_entry(sequence + 1))
                other = await self.other(name, data)
                if other is not None:
                    return other
                if follower is not None:
                    self._check_start(names.log_entry(sequence + 1), follower, name)
                    return None
                await self._sleep(POLL_S)
            self._dead = max(generation, self._dead) + 1
        return None

    def _check_start(self, follower: str, data: bytes, name: str) -> None:
        entry = joblog.ENTRIES.decode(data, follower, self._store.describe())
        if not isinstance(entry, joblog.GenerationStarted):
            raise CorruptError(
                f"the job log is damaged: the store let two coordinators write one entry name=`{name}`",
                where=self._store.describe(),
                fix="start the job from a savepoint, in a store that honours `If-None-Match: *`",
            )

    async def _is_claimed(self, generation: int) -> bool:
        return await self._store.read(names.generation_record(generation)) is not None
