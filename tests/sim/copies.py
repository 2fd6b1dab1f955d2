"""Disks that forget: what happens to copies of state files on machines whose workers are killed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run import Simulation


def spoil_copies(sim: Simulation) -> None:
    """Some copies are gone, cut short, or have other bytes; readers must notice."""
    files = sorted(Path(sim.folder).glob("headgate-copies-*/*/*/*"))
    for path in files:
        if path.name == "lock" or sim.rng.random() >= sim.spoiling:
            continue
        data = path.read_bytes()
        path.unlink()  # not in place: other links to the same file are as they were
        how = sim.rng.choice(("gone", "short", "other"))
        if how == "short":
            path.write_bytes(data[: len(data) // 2])
        elif how == "other":
            path.write_bytes(bytes(byte ^ 1 for byte in data))
        sim.watch.note(f"copy {how} {path.parent.name.rpartition('-')[0]} {path.name}")
        sim.watch.seen["copy spoiled"] += 1
