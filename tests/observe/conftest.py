"""A running job and what it shows: status, scraped metrics."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import headgate as hg
from headgate.runtime.control.job_client import JobClient
from headgate.runtime.protocol.job_result import JobOutcome
from headgate.tests.support.launched import while_running

Labels = dict[str, str]


class Scraped:
    """One answer of an endpoint."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: list[Metric] = list(text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}

    def values(self, name: str, **labels: str) -> list[float]:
        """Values of the samples called `headgate_<name>` that have these labels."""
        return [
            sample.value
            for sample in self.samples
            if sample.name == f"headgate_{name}" and labels.items() <= sample.labels.items()
        ]

    def value(self, name: str, **labels: str) -> float:
        """The sum of them; there must be some."""
        values = self.values(name, **labels)
        assert values, f"no sample {name} {labels}"
        return sum(values)


class Watched:
    """A job that runs."""

    def __init__(self, client: JobClient) -> None:
        self.client = client

    async def status(self) -> dict[str, Any]:
        return await self.client.request("status")

    async def scrape(self, endpoint: int = 0) -> Scraped:
        """What an endpoint of the job says."""
        url = (await self.status())["metrics"][endpoint]["url"]
        assert url.startswith("http://127.0.0.1:")
        return Scraped(await asyncio.to_thread(_get, url))

    async def until(self, condition: Callable[[Scraped], bool], endpoint: int = 0) -> Scraped:
        """Scrape until it is so."""
        while not condition(scraped := await self.scrape(endpoint)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return scraped


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., JobOutcome]:
    """Runs a job until a script has seen enough of it, then cancels it."""
    monkeypatch.setenv("HEADGATE_RUN_DIR", str(tmp_path / "run"))

    def run(
        job: hg.Job,
        script: Callable[[Watched], Awaitable[None]],
        cluster: str = "in-process",
    ) -> JobOutcome:
        return asyncio.run(while_running(job, cluster, lambda client: script(Watched(client))))

    return run
