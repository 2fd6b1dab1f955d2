"""Damages a state file, and restores the state in it, whole or in part; now and then with a whole job."""

from __future__ import annotations

import random

from headgate.tests.support import damaged_files, damaged_jobs

JOBS = 0.01
"""The share of cases that restore a whole job, which takes as long as a hundred reads of a file."""


def run(rng: random.Random) -> None:
    """One damage. Raises AssertionError if it gives a wrong result, or an error without a name."""
    if rng.random() < JOBS:
        backend, inline = rng.choice(damaged_jobs.BACKENDS), rng.choice(list(damaged_jobs.INLINE))
        _, objects = damaged_jobs.undamaged(backend, inline)
        damaged_jobs.check_damage(rng.choice(sorted(objects)), rng, backend, inline)
    else:
        name = rng.choice(sorted(damaged_files.files().objects))
        damaged_files.check_damage(name, rng.choice(list(damaged_files.PARTS)), rng)
