"""The costs of a shuffle between p and p subtasks, by formula.

    python benchmarks/scale/channels.py [--sizes 64x1 64x8 ...]     parallelism x slots of a worker

Nothing runs. Connections and channels are counted by the code that makes them.
"""

from __future__ import annotations

import argparse
import tracemalloc

from headgate.operators.partitioning import HashColumns
from headgate.runtime.exchange.partitioners import Connections

SIZES = ("8x1", "64x1", "64x8", "256x8", "1000x1", "1000x8", "1000x32")


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
        print(
            f"p={parallelism:,} slots={slots} workers={workers:,} "
            f"connections of a worker={2 * (workers - 1):,} of the job={workers * (workers - 1):,} "
            f"ends of channels in a worker={2 * slots * parallelism:,} of the job={2 * len(connections):,} "
            f"numbering={numbering:,} B"
        )


if __name__ == "__main__":
    main()
