"""A step of the jobs of these tests, which is imported in their pods: it makes their data last."""

from __future__ import annotations

import os
import time

import pyarrow as pa

HURRY = "/data/hurry"
"""While this file is missing, each batch takes a while."""
PAUSE_S = 0.25


def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, after a pause unless the test has asked to hurry."""
    if not os.path.exists(HURRY):
        time.sleep(PAUSE_S)
    return batch


def fast(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same without a pause, for the run that says what the result has to be."""
    return batch
