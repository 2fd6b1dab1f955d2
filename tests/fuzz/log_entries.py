"""Damages an entry of a job log, a generation record or the metadata of a savepoint, and reads it."""

from __future__ import annotations

import random

from headgate.tests.support.damaged_logs import check_damage, objects


def run(rng: random.Random) -> None:
    """One damage. Raises AssertionError if it gives a wrong result, or an error without a name."""
    check_damage(rng.choice(sorted(objects())), rng)
