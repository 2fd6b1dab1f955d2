"""The main job (examples/flights.py) with a sink that may be slow: `headgate run` starts it in the rig.

TOLL_MS is what a window costs, in ms. A toll of some ms makes the source wait, so that there are records on
their way which barriers can overtake.
"""

from __future__ import annotations

import os
import time
from typing import Any

import headgate as hg
from headgate.connectors import parquet_sink, parquet_source, throttle

TOLL_S = float(os.environ["TOLL_MS"]) / 1000


def toll(window: Any) -> bool:
    """Lets everything pass, and takes its time."""
    time.sleep(TOLL_S)
    return True


job = hg.Job("delays", parallelism=2)
job.checkpoint(every="1s", storage=os.environ["CHECKPOINTS"])
job.restart(attempts=1_000_000, delay="100ms")

rate = float(os.environ["FLIGHTS_PER_SECOND"])
flights = job.read(
    throttle(parquet_source(os.environ["FLIGHTS"], batch_rows=200), rate), name="flights"
)
delays = (
    flights.event_time("time_hour", max_out_of_order="24h")
    .key_by("origin")
    .window(hg.tumbling("1h"))
    .agg(
        flights=hg.count(),
        mean_delay=hg.avg("dep_delay"),
        worst_delay=hg.max("dep_delay"),
        name="delays",
    )
)
delays.filter(toll, name="toll").write(
    parquet_sink(os.environ["RESULTS"], guarantee="exactly_once"), name="results"
)
