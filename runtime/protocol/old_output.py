"""The output of earlier runs that a run replaces, and when it may be deleted. Decisions only.

A run that overwrites lists the files of earlier runs before it writes anything of its own. The list
is an entry of the job log (`OutputListed`), so every coordinator of the run knows the same files,
and no file that appears later is ever among them.

The files of a sink become *due* with the first checkpoint before whose barrier the sink has taken
records. The entry that completes that checkpoint records it: the same append permits the commit of
the new output and the deletion of the old. They are *ready* once all subtasks of the sink have
committed that checkpoint. So the old output exists until the new one is visible, and a coordinator
that dies anywhere in between leaves all that the next one needs.

Entries of checkpoints repeat this state, because the entries before them are trimmed.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Final, final

import msgspec

from ...operators.sink import OutputFile
from ...state.sealed import Record


@final
class OldOutput(Record, frozen=True, kw_only=True):
    """The output of earlier runs that a run has still to delete."""

    run: str = ""
    """The run that made the list; empty: none did."""
    sequence: int = 0
    """The entry of the job log that has the files of `sinks`; 0: there are none."""
    sinks: tuple[str, ...] = ()
    """The names of the sinks with files that are still to be deleted."""
    due: dict[str, int] = msgspec.field(default_factory=dict)
    """The checkpoint, by sink, whose commit makes the first new output visible, once it is complete."""

    def listed(self, run: str, sequence: int, sinks: Collection[str]) -> OldOutput:
        """Return the state after an entry that lists the files of `sinks`, and of no others."""
        due = {name: id_ for name, id_ in self.due.items() if name in sinks}
        return OldOutput(
            run=run, sequence=sequence if sinks else 0, sinks=tuple(sorted(sinks)), due=due
        )

    def completed(self, checkpoint_id: int, wrote: Collection[str]) -> OldOutput:
        """Return the state once a checkpoint is complete.

        Args:
            checkpoint_id: the checkpoint.
            wrote: names of the sinks that have taken records before its barrier, and show some.
        """
        due = self.due | {
            name: checkpoint_id for name in self.sinks if name in wrote and name not in self.due
        }
        return msgspec.structs.replace(self, due=due)

    def ready(self, committed: Mapping[str, int]) -> tuple[str, ...]:
        """Return the names of the sinks whose old files may be deleted.

        Args:
            committed: by sink, the newest checkpoint that all of its subtasks have committed.
        """
        return tuple(
            name for name in self.sinks if name in self.due and committed[name] >= self.due[name]
        )


NO_OLD_OUTPUT: Final = OldOutput()
"""Nothing is to be deleted, and no run has made a list."""


def pack(files: Sequence[OutputFile]) -> bytes:
    """Encode a list of files for the job log; names of one sink are similar, so they compress well."""
    return zlib.compress(msgspec.msgpack.encode(files))


def unpack(data: bytes) -> list[OutputFile]:
    """Decode the files of `pack`."""
    return msgspec.msgpack.decode(zlib.decompress(data), type=list[OutputFile])
