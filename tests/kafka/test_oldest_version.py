"""Source and exactly-once sink on the oldest version of Kafka that is tested."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from headgate.state.snapshot import CommitPermit
from headgate.testing.servers.kafka import OLDEST, KafkaServer, running
from headgate.tests.kafka.test_exactly_once import batches, opened, prepared, run, sink, visible
from headgate.tests.support.skips import available


@pytest.fixture(scope="module")
def old_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    with available(running(tmp_path_factory.mktemp("kafka") / "old", OLDEST)) as server:
        yield server


def test_another_process_commits_what_a_dead_one_prepared(old_broker: KafkaServer) -> None:
    """The source reads what was committed, and nothing of the transaction that was not."""
    old_broker.create_topic("results")

    async def scenario() -> None:
        made = sink(old_broker, "results", killed=True)
        dead = await opened(made)
        first, second = batches(2)
        dead.write(first)
        committables = await prepared(dead, 1)
        dead.write(second)
        await prepared(dead, 2)
        assert await visible(old_broker, "results") == []
        other = await opened(made, committables, attempt=2, restored_checkpoint=1)
        for _ in range(2):
            await asyncio.to_thread(other.commit, committables, CommitPermit("old", 0, 1))
            assert len(await visible(old_broker, "results")) == 3
        other.close()

    run(scenario())
