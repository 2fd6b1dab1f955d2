"""Spans of OpenTelemetry, as its SDK takes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import Crash, blackhole, from_list
from headgate.errors import PlanError
from headgate.operators import extras
from headgate.runtime.coordinator import job as coordinator
from headgate.runtime.observe.spans import NoSpans, OtelSpans, open_spans
from headgate.runtime.options.registry import Options
from headgate.tests.support.held import PacedByCompletion

pytest.importorskip("opentelemetry.sdk", reason="pip install 'headgate[otel]'")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The collector of the spans of all jobs."""
    exporter = InMemorySpanExporter()

    def open_here(options: Options, job_name: str) -> OtelSpans:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        return OtelSpans(provider, job_name)

    monkeypatch.setattr(coordinator, "open_spans", open_here)
    return exporter


def test_checkpoints_restores_and_starts(exported: InMemorySpanExporter, tmp_path: Path) -> None:
    job = hg.Job("traced")
    job.checkpoint(every="20ms", storage=str(tmp_path / "checkpoints"))
    job.restart(attempts=3, delay="0s")
    source = PacedByCompletion(from_list([1, 2, Crash(), 3], batch_rows=1), 2)
    job.read(source, name="items").write(blackhole(), name="out")
    assert job.run().status == "FINISHED"
    spans: dict[str, list[Any]] = {}
    for span in exported.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
        assert span.attributes["headgate.job.name"] == "traced"
        assert span.start_time <= span.end_time
    first, again = spans["headgate.job.start"]
    assert first.attributes["headgate.job.state_before"] == "initializing"
    assert first.attributes["headgate.checkpoint.id"] == 0
    assert again.attributes["headgate.job.state_before"] == "restarting"
    (restore,) = spans["headgate.restore"]
    restored = restore.attributes["headgate.checkpoint.id"]
    assert restored == again.attributes["headgate.checkpoint.id"] > 0
    completed = {
        span.attributes["headgate.checkpoint.id"]: span
        for span in spans["headgate.checkpoint"]
        if span.attributes["headgate.checkpoint.status"] == "completed"
    }
    one = completed[restored]
    assert one.status.status_code is StatusCode.UNSET
    assert one.attributes["headgate.checkpoint.subtasks_acknowledged"] == 1
    assert one.attributes["headgate.checkpoint.state_bytes"] > 0
    assert "took" in one.attributes["headgate.checkpoint.explanation"]


def test_a_span_that_failed_says_why() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    OtelSpans(provider, "j").add("headgate.checkpoint", 2_000, 1_000, {}, failed="it expired")
    (span,) = exporter.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "it expired")
    assert span.start_time == span.end_time == 2_000_000_000, "a clock may be set back"


def test_without_an_address_there_are_none() -> None:
    assert isinstance(open_spans(Options({}), "j"), NoSpans)


def test_an_address_opens_an_exporter() -> None:
    spans = open_spans(Options({"traces.otlp.endpoint": "http://127.0.0.1:9/v1/traces"}), "j")
    assert isinstance(spans, OtelSpans)
    asyncio.run(spans.close())


def test_what_is_not_installed_is_said_before_the_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    job = hg.Job("j", options={"traces.otlp.endpoint": "http://127.0.0.1:9/v1/traces"})
    job.read(from_list([1]), name="items").write(blackhole(), name="out")
    with pytest.raises(PlanError, match="traces.otlp.endpoint") as caught:
        job.validate()
    assert "headgate[otel]" in caught.value.fix
