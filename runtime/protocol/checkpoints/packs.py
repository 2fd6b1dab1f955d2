"""Packs: the in-flight records of all channels of one subtask in one exchange, with one handle.

A pack consists of runs and their list. A run has records of one channel, as bytes; the runs lie one behind
the other, in the order in which they are restored. Behind them comes the list: of each run the index of
the subtask at the other end, its rows, size and checksum. The handle has size and checksum of the list as
its `footer`. So the manifest does not grow with the number of channels, and a subtask that restores some
of them reads the list, and then the bytes of their runs.

`runs_of` turns the list into handles of single channels, as checkpoints up to format 7 have them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final, final

import msgspec
import numpy as np
import xxhash

from ....errors import StateError, check
from ....state.snapshot import MANY, ChannelAddress, StateHandle

FORMAT: Final = 1
"""The first element of a list; a newer headgate may write another one."""
_RUN: Final = np.dtype(
    [("other", "<u4"), ("rows", "<u8"), ("size_bytes", "<u8"), ("checksum", "<u8")]
)


def address_of(channel: ChannelAddress, kind: str) -> ChannelAddress:
    """Return the address of the pack for records of a channel; `kind` is that of its handle."""
    if kind == "input":
        return msgspec.structs.replace(channel, sender=MANY)
    return msgspec.structs.replace(channel, receiver=MANY)


def is_pack(handle: StateHandle) -> bool:
    """Return True if `handle` has the records of many channels."""
    return handle.channel is not None and MANY in (handle.channel.sender, handle.channel.receiver)


@final
class PackBuilder:
    """Appends one pack to the content of a file, run by run."""

    def __init__(self, content: bytearray, state: str, kind: str, channel: ChannelAddress) -> None:
        """
        Args:
            content: of the file; it may end with other packs.
            state: the name of the state in the manifest.
            kind: of the handle.
            channel: the address of the pack.
        """
        self._content = content
        self._start = len(content)
        self._state = state
        self._kind = kind
        self._channel = channel
        self._runs: list[tuple[int, int, int, int]] = []

    def add(self, channel: ChannelAddress, data: bytes, rows: int) -> None:
        """Append the records of a channel."""
        other = channel.sender if self._kind == "input" else channel.receiver
        self._runs.append((other, rows, len(data), xxhash.xxh3_64_intdigest(data)))
        self._content += data

    def finish(self) -> StateHandle:
        """Append the list, and return the handle of the pack."""
        listed = msgspec.msgpack.encode((FORMAT, np.array(self._runs, _RUN).tobytes()))
        self._content += listed
        with memoryview(self._content) as view:
            checksum = xxhash.xxh3_64_hexdigest(view[self._start :])
        return StateHandle(
            state=self._state,
            kind=self._kind,
            size_bytes=len(self._content) - self._start,
            checksum=checksum,
            rows=sum(rows for _, rows, _, _ in self._runs),
            footer=(len(listed), xxhash.xxh3_64_hexdigest(listed)),
            channel=self._channel,
            offset=self._start,
        )


def handle_of_list(pack: StateHandle) -> StateHandle:
    """Return a handle of the list at the end of a pack."""
    check(pack.footer is not None, "a pack without a list", channel=pack.channel)
    assert pack.footer is not None  # for the type checker
    size, checksum = pack.footer
    return _part(pack, pack.size_bytes - size, size, checksum)


def runs_of(
    pack: StateHandle, data: bytes, receivers: Set[int] | None = None
) -> Sequence[StateHandle]:
    """Return a handle for each run of a pack.

    Args:
        pack: the handle of the pack.
        data: its list.
        receivers: of the pack of a sender, the subtasks whose records are needed; None: all.

    Raises:
        StateError: a newer headgate wrote the list.
    """
    found = msgspec.msgpack.decode(data)
    if not isinstance(found, list) or found[:1] != [FORMAT]:
        raise StateError(
            f"the list of records on their way is in an unknown format format=`{str(found)[:20]}`",
            fix="restore with the version of headgate that took the checkpoint",
        )
    runs = np.frombuffer(found[1], _RUN)
    channel = pack.channel
    assert channel is not None  # of a pack
    sends = channel.receiver == MANY
    needed = np.arange(len(runs))
    if sends and receivers is not None:
        needed = np.flatnonzero(np.isin(runs["other"], sorted(receivers)))
    starts = np.cumsum(runs["size_bytes"]) - runs["size_bytes"]
    return [
        _part(
            pack,
            start,
            size,
            f"{checksum:016x}",
            rows,
            msgspec.structs.replace(channel, **{"receiver" if sends else "sender": other}),
        )
        for start, (other, rows, size, checksum) in zip(
            starts[needed].tolist(), runs[needed].tolist(), strict=True
        )
    ]


def _part(
    pack: StateHandle,
    start: int,
    size: int,
    checksum: str,
    rows: int = 0,
    channel: ChannelAddress | None = None,
) -> StateHandle:
    """Return a handle of a part of a pack."""
    inline = None if pack.inline is None else pack.inline[start : start + size]
    return msgspec.structs.replace(
        pack,
        size_bytes=size,
        checksum=checksum,
        rows=rows,
        channel=channel or pack.channel,
        inline=inline,
        offset=pack.offset + start if inline is None else 0,
        footer=None,
    )
