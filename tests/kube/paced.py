"""A step of the jobs of these tests, imported in their pods, that makes their data last longer."""

from __future__ import annotations

import os
import time

import pyarrow as pa

HURRY = "/data/hurry"
"""While this file is missing, each batch takes a while."""
PAUSE_S = 0.25


def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch, after a pause unless the test has asked to hurry."""
    if not os.path.exists(HURRY):
        time.sleep(PAUSE_S)
    return batch


def fast(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch without a pause, for the run that gives the expected result."""
    return batch
