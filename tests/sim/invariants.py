"""Conditions that hold at any moment, beside those for visible output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headgate.runtime.protocol.checkpoints.coordinator import CheckpointCoordinator
from headgate.runtime.protocol.checkpoints.manifest import Manifest
from headgate.runtime.task.input_subtask import InputSubtask
from headgate.state.snapshot import StateHandle

from .outside import Split, World

_decide = CheckpointCoordinator._decisions
_obey = InputSubtask._obey


def _decisions(self: CheckpointCoordinator[Any]) -> list[Any]:
    """After each event the coordinator's state is one that may be."""
    decisions = _decide(self)
    self.validate()
    return decisions


def _obeyed(self: InputSubtask, decisions: list[Any]) -> None:
    """After each barrier so are the alignment and the gate."""
    _obey(self, decisions)
    self._barriers_in.validate()
    self.gate.validate()


STAND_INS: list[tuple[str, Any]] = [
    (
        "headgate.runtime.protocol.checkpoints.coordinator.CheckpointCoordinator._decisions",
        _decisions,
    ),
    ("headgate.runtime.task.input_subtask.InputSubtask._obey", _obeyed),
    # Batches of a simulation are small, and their records should be sent as arrays all the same.
    ("headgate.operators.elements.ObjectBatch.NUMBERS_MIN", 1),
]


def check_conserved(
    manifest: Manifest,
    world: World,
    read: Callable[[StateHandle], bytes],
    visible: Sequence[tuple[int, ...]] | None = None,
) -> None:
    """Check the records that the sources of a checkpoint, or savepoint, have read.

    Each of them is in its sink, visible before it, or on its way.

    For jobs that make one record of one. This is what barriers are for; so a cut that is none shows
    with the checkpoint, and not only if it happens to be restored. `visible` are the records that had
    become visible before it; None: all that are.
    """
    visible = world.visible if visible is None else visible
    items = [handle for handle in manifest.handles() if handle.kind == "items"]
    sources = [_items(handle, read) for handle in items if handle.state == "splits"]
    positions = [
        msgspec.msgpack.decode(split, type=Split) for splits in sources for split in splits
    ]
    names = [
        name
        for handle in items
        if handle.state == "committables"
        for item in _items(handle, read)
        for pending in msgspec.msgpack.decode(item)
        for name in pending["committables"]
    ]
    written = [world.transactions[name] for name in sorted(set(names))]
    records = [record for each in written if each.state != "committed" for record in each.records]
    under_way = sum(handle.rows for handle in manifest.handles() if handle.channel is not None)
    wanted, found = sum(split.position for split in positions), len(visible) + len(records)
    if wanted != found + under_way:
        world.violated(
            f"checkpoint {manifest.checkpoint_id} is no cut: {wanted} records read, {len(visible)} "
            f"visible, {len(records)} to be committed, {under_way} on their way"
        )
        return
    counts = Counter(record[2] for record in (*visible, *records))
    twice = [number for number, count in counts.items() if count > 1]
    if twice:
        world.violated(f"checkpoint {manifest.checkpoint_id} is no cut: twice in it: {twice[:5]}")


def _items(handle: StateHandle, read: Callable[[StateHandle], bytes]) -> list[bytes]:
    data = handle.inline if handle.inline is not None else read(handle)
    return msgspec.msgpack.decode(data, type=list[bytes])
