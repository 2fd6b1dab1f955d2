"""The costs of a shuffle between p and p subtasks, by formula.

    python benchmarks/scale/channels.py [--sizes 64x1 64x8 ...]     parallelism x slots of a worker

Nothing runs. Connections and channels are counted by the code that makes them; the handles of an unaligned
checkpoint are made and encoded as the log does it, if each channel has records on their way.
"""

from __future__ import annotations

import argparse
import tracemalloc

import msgspec

from headgate.operators.partitioning import HashColumns
from headgate.runtime.exchange.partitioners import Connections
from headgate.state.snapshot import ChannelAddress, StateHandle

SIZES = ("8x1", "64x1", "64x8", "256x8", "1000x1", "1000x8", "1000x32")


def handle(sender: int, receiver: int) -> StateHandle:
    """Return what a checkpoint has of one channel at one of its ends."""
    address = ChannelAddress(
        source="read", side="", target="sums", input_index=0, sender=sender, receiver=receiver
    )
    return StateHandle(
        state="in-flight", kind="input", size_bytes=41_312, checksum="0123456789abcdef", rows=1_024,
        file=f"chk/1-1000/sums-{receiver}-in-flight-0123456789abcdef.arrow", channel=address,
        offset=41_312 * sender,
    )  # fmt: skip


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    for size in parser.parse_args().sizes:
        parallelism, slots = map(int, size.split("x"))
        workers = -(-parallelism // slots)
        tracemalloc.start()
        connections = Connections(HashColumns(("k",)), parallelism, parallelism)
        last = connections.number(parallelism - 1, parallelism - 1)
        numbering = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert last == len(connections) - 1
        one = len(msgspec.json.encode(handle(parallelism - 1, parallelism - 1)))
        print(
            f"p={parallelism:,} slots={slots} workers={workers:,} "
            f"connections of a worker={2 * (workers - 1):,} of the job={workers * (workers - 1):,} "
            f"ends of channels in a worker={2 * slots * parallelism:,} of the job={2 * len(connections):,} "
            f"numbering={numbering:,} B "
            f"handles of an unaligned checkpoint={2 * len(connections) * one / 1e6:,.0f} MB as JSON"
        )


if __name__ == "__main__":
    main()
