"""The size and checksum of a local file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import xxhash

READ_CHUNK_BYTES: Final = 4 << 20


def measure_file(path: Path) -> tuple[int, str]:
    """Size and checksum of a local file. Blocking."""
    digest, size = xxhash.xxh3_64(), 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()
