"""Files that Flink needs for the same rows and queries as headgate's Nexmark: its pools, and a small
jar.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np

from headgate.connectors.nexmark import nexmark

BLOCK_ROWS = 65_536
EXTRA_BYTES = 60
_JAVA = sorted(Path(__file__).with_name("java").glob("*.java"))
_SERVICE = "META-INF/services/org.apache.flink.table.factories.Factory"


def write_pools(path: Path, rows: int) -> None:
    """Write the pools of random draws, and where each block of `rows` rows begins in them."""
    source = nexmark("bid")
    pools = source.pools
    source.make(0, 1)  # fills the pools of all columns
    blocks = -(-rows // BLOCK_ROWS)
    arrays = [
        pools.below("auction", 111),
        pools.masks("auction-hot", 2),
        pools.below("bidder", 1011),
        pools.masks("bidder-hot", 4),
        pools.texts("price", _missing).to_numpy(),
        np.array([pools.spans(block * BLOCK_ROWS, 1)[0][0] for block in range(blocks)]),
    ]
    with path.open("wb") as file:
        for array in arrays:
            file.write(np.int64(len(array)).tobytes())
            file.write(array.astype("<i8").tobytes())
        extra = pools.texts("extra", _missing)
        file.write(extra.buffers()[2])


def _missing(seed: int) -> None:
    raise LookupError("the generator did not make this pool")


def build_jar(jar: Path, flink_home: Path) -> None:
    """Compile the tables and functions. Needs a JDK; the classes of Flink are in `flink_home`/lib."""
    classes = jar.with_suffix(".classes")
    shutil.rmtree(classes, ignore_errors=True)
    (classes / _SERVICE).parent.mkdir(parents=True)
    (classes / _SERVICE).write_text("Bids\nSide\n")
    classpath = f"{flink_home}/lib/*"
    subprocess.run(
        ["javac", "-nowarn", "-proc:none", "-cp", classpath, "-d", str(classes), *map(str, _JAVA)],
        check=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    subprocess.run(["jar", "cf", str(jar), "-C", str(classes), "."], check=True)
