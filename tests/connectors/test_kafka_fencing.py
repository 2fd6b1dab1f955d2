"""A staged epoch is committed by one producer at a time; one that is fenced says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from headgate.connectors import kafka_sink
from headgate.connectors.kafka import committing
from headgate.connectors.kafka.committing import StagedEpoch
from headgate.errors import JobError
from headgate.testing.connectors import make_context


def _writer() -> Any:
    return kafka_sink(
        "t", bootstrap="127.0.0.1:1", guarantee="exactly_once", transactions="staged"
    ).writer()


@pytest.mark.parametrize("closed", [True, False])
def test_a_closed_writer_does_not_fence_the_next_attempt(
    closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[Callable[[], Any]] = []
    made: list[str] = []

    def make_producer(*arguments: Any) -> Any:
        made.append(arguments[2])
        return SimpleNamespace(init_transactions=lambda timeout: None)

    monkeypatch.setattr(committing, "make_producer", make_producer)
    writer = _writer()
    writer.open(replace(make_context(), run_in_thread=threads.append))
    writer._commits = True
    writer.on_checkpoint_complete(1)
    if closed:
        writer.close()
    for call in threads:
        call()
    assert len(made) == (0 if closed else 1)


def test_a_fatal_error_behind_which_other_reports_come_is_told() -> None:
    """The binding hides it in a SystemError."""
    fenced = KafkaException(
        KafkaError(KafkaError._FENCED, "fenced by a newer instance", fatal=True)
    )

    def flush(timeout: float) -> int:
        raise SystemError("returned a result with an exception set") from fenced

    client: Any = SimpleNamespace(marked=lambda *_: 0, prepared=lambda *_, **__: None)
    producer: Any = committing.TransactionalProducer(_writer()._settings, "hg-1")
    producer.ready.set()
    producer.producer = SimpleNamespace(begin_transaction=lambda: None, flush=flush)
    epoch = StagedEpoch("hg-1", "t", 1, 0, [])
    committer = committing._StagedCommitter(
        _writer()._settings, client, epoch, producer, lambda: False
    )
    with pytest.raises(JobError, match="could not be written.*fenced by a newer instance"):
        committer.commit(0)
