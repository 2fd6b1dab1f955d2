"""A step of the jobs of these tests, imported in their pods, that makes their data last longer."""

from __future__ import annotations

import os
import time

import pyarrow as pa

HURRY = "/data/hurry"
"""While this file is missing, each batch takes a while."""
PAUSE_S = 0.25
PART = 0.01
"""The pause for a batch, as a part of the time since the process began."""
_began_s = time.monotonic()


def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch, after a pause unless the test has asked to hurry.

    The pauses become longer with time, so that the data does not end before a test on a slow machine asks
    for it.
    """
    if not os.path.exists(HURRY):
        time.sleep(max(PAUSE_S, PART * (time.monotonic() - _began_s)))
    return batch


def fast(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch without a pause, for the run that gives the expected result."""
    return batch
