"""Records do not wait for the buffer timeout while neither end of a channel has anything else to do.

In these jobs the timeout is an hour, and the source goes on only once the sink has the last record.
"""

from __future__ import annotations

from typing import Any

import pytest

import headgate as hg
from headgate.connectors import function_sink
from headgate.tests.support.echo import ARRIVED, PATIENCE_S, ROUNDS, Echo, arrive


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("hops", [1, 3])
def test_a_record_arrives_though_no_other_comes(parallelism: int, hops: int) -> None:
    while not ARRIVED.empty():  # a test that failed may have left some
        ARRIVED.get()
    options = {"execution.buffer-timeout.interval": "1h"}
    job = hg.Job("echo", parallelism=parallelism, options=options)
    stream: Any = job.read(Echo(), name="echo")
    for hop in range(hops):
        stream = stream.rebalance().map(lambda n: n, name=f"hop {hop}")
    stream.write(function_sink(arrive, guarantee="none"), name="out")
    job.run()
    # All but the last one, which the end of the data brings, had to be there for the next to come.
    assert ARRIVED.get(timeout=PATIENCE_S) == ROUNDS - 1
