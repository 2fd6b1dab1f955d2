"""The labs in which jobs are stopped and killed keep a job running until the test's script is over."""

from __future__ import annotations

from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers


@pytest.mark.parametrize("name", ["lab", "plain_lab"])
def test_a_job_with_little_data_is_there_to_be_stopped(
    request: pytest.FixtureRequest, name: str
) -> None:
    lab = request.getfixturevalue(name)
    job = hg.Job("job")
    job.checkpoint(every="10ms", storage=lab.storage)
    job.read(numbers(10), name="numbers").write(collect(guarantee="none"), name="out")

    async def script(running: Any) -> None:
        for _ in range(5):
            await running.checkpoint()
        await running.request("stop")

    assert lab.run(job, script).outcome.status == "SUSPENDED"
