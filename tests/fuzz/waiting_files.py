"""Damages a draft of a file sink before it is committed, or a file of a Spark result before it is read."""

from __future__ import annotations

import random

from headgate.tests.support.damaged_parts import FORMATS, check_draft, check_result


def run(rng: random.Random) -> None:
    """One damage. Raises AssertionError if it gives a wrong result, or an error without a name."""
    if rng.random() < 0.5:
        check_draft(rng.choice(FORMATS), rng)
    else:
        check_result(rng)
