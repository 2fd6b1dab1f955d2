"""Spans of checkpoints, restores and starts for OpenTelemetry; without the option they cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeAlias, final

from ...operators.extras import check_extra
from ..options.monitoring import TRACES_ENDPOINT
from ..options.registry import Options

EXPORT_S_MAX: Final = 5
"""Longest time for handing spans to the collector, also when the job ends: it must not wait for them."""
_NS_PER_MS: Final = 1_000_000
Attributes: TypeAlias = Mapping[str, str | int | float | bool]


class Spans(Protocol):
    """Takes spans that are over."""

    def add(
        self, name: str, began_ms: int, ended_ms: int, attributes: Attributes, failed: str = ""
    ) -> None:
        """Report a span.

        Args:
            name: what happened, such as `headgate.checkpoint`.
            began_ms: ms since 1970.
            ended_ms: likewise.
            attributes: what else is known, by names that begin with `headgate.`.
            failed: why it failed; empty if it did not.
        """
        ...

    async def close(self) -> None:
        """Send the remaining spans, in bounded time."""
        ...


@final
class NoSpans:
    """Takes no spans, because the option is not set."""

    def add(
        self, name: str, began_ms: int, ended_ms: int, attributes: Attributes, failed: str = ""
    ) -> None:
        """Forget it."""

    async def close(self) -> None:
        """There is nothing left."""


@final
class OtelSpans:
    """Hands spans to a tracer provider of OpenTelemetry's SDK, each as a trace of its own."""

    def __init__(self, provider: Any, job_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("headgate")
        self._job_name = job_name

    def add(
        self, name: str, began_ms: int, ended_ms: int, attributes: Attributes, failed: str = ""
    ) -> None:
        """See `Spans`."""
        from opentelemetry.trace import Status, StatusCode  # of an extra

        known = {"headgate.job.name": self._job_name, **attributes}
        span = self._tracer.start_span(name, start_time=began_ms * _NS_PER_MS, attributes=known)
        if failed:
            span.set_status(Status(StatusCode.ERROR, failed))
        span.end(end_time=max(began_ms, ended_ms) * _NS_PER_MS)

    async def close(self) -> None:
        """See `Spans`. It blocks, so it has a thread."""
        await asyncio.to_thread(self._provider.shutdown)


def open_spans(options: Options, job_name: str) -> Spans:
    """Open the place to which the spans of a job go.

    Raises:
        PlanError: the job asks for spans, and the extra `otel` is not installed.
    """
    endpoint = options.get(TRACES_ENDPOINT)
    if endpoint is None:
        return NoSpans()
    check_extra("otel", f"the option {TRACES_ENDPOINT.key}")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "headgate"}))
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S_MAX)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelSpans(provider, job_name)
