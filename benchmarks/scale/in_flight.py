"""The manifest of an unaligned checkpoint of a wide shuffle: each channel has records at both ends.

    python benchmarks/scale/in_flight.py [--parallelism 64 256 1000]

One sender and one receiver write what they have of all their channels, as subtasks do. All others are taken
to have the same. The manifest is encoded as the job log does it.
"""

from __future__ import annotations

import argparse
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import pyarrow as pa

from headgate.operators.elements import CheckpointBarrier, CheckpointOptions, ColumnBatch
from headgate.runtime.exchange.channel_state import InFlightRecords
from headgate.runtime.exchange.partition import OutgoingBarrier
from headgate.runtime.protocol.checkpoints.manifest import (
    Manifest,
    ManifestOperator,
    ManifestSubtask,
)
from headgate.runtime.task.channel_state_writer import InFlightCut, InputCapture
from headgate.state.snapshot import ChannelAddress, OperatorSnapshot, StateHandle

PARALLELISM = (64, 256, 1000)
BATCH = ColumnBatch(pa.record_batch({"k": pa.array(range(64)), "n": pa.array(range(64))}))


@dataclass(frozen=True)
class Figures:
    """The cost of an unaligned checkpoint: handles, and bytes of the manifest."""

    handles: int
    json_bytes: int
    zstd_bytes: int
    memory_bytes: int
    """The memory of the coordinator that holds the manifest."""


def handles_of(parallelism: int, kind: str) -> list[StateHandle]:
    """Return what the first subtask at one end of the shuffle writes."""
    records = InFlightRecords()
    for other in range(parallelism):
        sender, receiver = (other, 0) if kind == "input" else (0, other)
        records.add(
            ChannelAddress(
                source="read", side="", target="sums", input_index=0, sender=sender, receiver=receiver
            ),
            BATCH,
        )  # fmt: skip
    if kind == "input":
        return InFlightCut(InputCapture(records), ()).encode()[0]
    outgoing = OutgoingBarrier(CheckpointBarrier(1, 0, CheckpointOptions()), (), ())
    outgoing.overtaken = records
    return InFlightCut(None, [outgoing]).encode()[0]


def of_subtask(handles: list[StateHandle], kind: str, index: int) -> Iterator[StateHandle]:
    """Yield what another subtask writes."""
    end = "receiver" if kind == "input" else "sender"
    for number, handle in enumerate(handles):
        assert handle.channel is not None
        digest = f"{(index * 65_537 + number) * 0x9E3779B97F4A7C15 % 2**64:016x}"
        fields: dict[str, Any] = {
            "channel": msgspec.structs.replace(handle.channel, **{end: index}),
            "checksum": digest,
            "footer": handle.footer and (handle.footer[0], digest[::-1]),
            "file": f"chk/1-1000/{handle.channel.target}-{index}-channel-state-0123456789abcdef.channel",
        }
        yield msgspec.structs.replace(handle, **fields)


def manifest_of(parallelism: int) -> Manifest:
    """Return the manifest of a checkpoint."""
    operators = []
    for name, kind in (("read", "output"), ("sums", "input")):
        handles = handles_of(parallelism, kind)
        subtasks = [
            ManifestSubtask(
                subtask=index,
                snapshots=(
                    OperatorSnapshot(
                        operator=name, handles=tuple(of_subtask(handles, kind, index))
                    ),
                ),
            )
            for index in range(parallelism)
        ]
        operators.append(
            ManifestOperator(name=name, parallelism=parallelism, subtasks=tuple(subtasks))
        )
    return Manifest(
        checkpoint_id=1, trigger_ms=0, completed_ms=0, duration_ms=0, max_parallelism=32_768,
        operators=tuple(operators),
    )  # fmt: skip


def measure(parallelism: int) -> Figures:
    """Make the manifest, and measure it."""
    tracemalloc.start()
    manifest = manifest_of(parallelism)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    data = msgspec.json.encode(manifest)
    return Figures(
        handles=sum(1 for _ in manifest.handles()),
        json_bytes=len(data),
        zstd_bytes=len(pa.compress(data, codec="zstd", asbytes=True)),
        memory_bytes=memory,
    )


def main() -> None:
    """Print a line for each parallelism."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallelism", nargs="+", type=int, default=PARALLELISM)
    for parallelism in parser.parse_args().parallelism:
        figures = asdict(measure(parallelism))
        print(
            f"p={parallelism:,}",
            *(f"{name}={value:,}" for name, value in figures.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
