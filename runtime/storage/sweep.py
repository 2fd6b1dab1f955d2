"""Sweeps a job's state files: deletes those that no checkpoint needs, and checks the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from ..protocol import names
from ..protocol.checkpoints.manifest import FileProblem, Manifest, orphans, verify
from .base import CheckpointStore


async def sweep_orphans(store: CheckpointStore, keep: set[str], generation: int) -> list[str]:
    """Delete state files of earlier generations that are not in `keep`; return their names, sorted.

    For the coordinator of `generation`, after its start entry is in the log and before its first
    checkpoint: from then on no earlier generation can complete one. Also for a coordinator whose
    own generation is over, by its end in the log, and which names the next. Unfinished files of
    dead writers are deleted as well.

    Raises:
        StorageError: the store cannot be listed, or refuses to delete.
    """
    present = [name async for name, _ in store.list_files(f"{names.CHECKPOINTS}/")]
    doomed = orphans(present, keep, generation)
    await store.delete_files(doomed)
    await store.delete_incomplete(names.CHECKPOINTS)
    return doomed


@dataclass(frozen=True, slots=True)
class Findings:
    """The problems in a job's storage.

    Attributes:
        problems: by checkpoint id, its files that are missing or of another size.
        corrupt: files with wrong bytes; only if they were read.
        orphans: files that no checkpoint needs.
    """

    problems: dict[int, list[FileProblem]]
    corrupt: list[str]
    orphans: list[str]


async def examine(
    store: CheckpointStore, manifests: Iterable[Manifest], generation: int, *, read: bool
) -> Findings:
    """Check that the files of all retained checkpoints exist; changes nothing.

    Args:
        store: of the job.
        manifests: of the retained checkpoints.
        generation: of the current or last coordinator: younger files do not count as orphans.
        read: also read every file, one by one, and compare checksums.
    """
    retained = list(manifests)
    present = {name: size async for name, size in store.list_files(f"{names.CHECKPOINTS}/")}
    problems = {manifest.checkpoint_id: verify(manifest, present) for manifest in retained}
    bad = {problem.file for found in problems.values() for problem in found}
    pieces: dict[str, set[tuple[int, int, str]]] = {}
    """The start, end and checksum of each piece, by file. Most files are one piece."""
    for manifest in retained:
        for handle in manifest.handles():
            if handle.file is not None and handle.file not in bad:
                piece = (handle.offset, handle.offset + handle.size_bytes, handle.checksum)
                pieces.setdefault(handle.file, set()).add(piece)
    corrupt = []
    for name in sorted(pieces) if read else ():
        content = memoryview(await store.read_file(name))
        if any(
            xxhash.xxh3_64_hexdigest(content[start:end]) != checksum
            for start, end, checksum in pieces[name]
        ):
            corrupt.append(name)
    return Findings(
        {id_: found for id_, found in problems.items() if found},
        corrupt,
        orphans(present, pieces.keys() | bad, generation),
    )
