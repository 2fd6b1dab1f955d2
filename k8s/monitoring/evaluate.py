"""The value of each panel and alert in a Prometheus that scrapes a job."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from typing import Any

from ...errors import UsageError
from .alerts import ALERTS
from .boards import BOARDS
from .grafana import expanded

TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Watched:
    """One expression of a dashboard or an alert.

    Attributes:
        where: the dashboard and the panel, or the alert.
        expression: the expression in PromQL, except for the variables of dashboards.
        needs: why a running job alone has no series for it; empty: it has.
    """

    where: str
    expression: str
    needs: str


def watched() -> Iterator[Watched]:
    """Return all expressions; those of alerts without the condition."""
    for board in BOARDS:
        for panel in board.panels:
            for query in panel.queries:
                where = f"{board.title.removeprefix('headgate / ')}: {panel.title}"
                yield Watched(where, expanded(query.expression), panel.needs)
    for alert in ALERTS:
        yield Watched(alert.name, alert.value, alert.needs)


def filled(expression: str, *, namespace: str, job_name: str, interval: str) -> str:
    """Return an expression with values for the variables of dashboards."""
    return (
        expression.replace("$namespace", namespace)
        .replace("$job_name", job_name)
        .replace("$task", ".*")
        .replace("$__rate_interval", interval)
    )


def query(url: str, expression: str) -> list[dict[str, Any]]:
    """Return the series of an instant query.

    Raises:
        UsageError: Prometheus cannot be reached, or refuses the expression.
    """
    data = urllib.parse.urlencode({"query": expression}).encode()
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query", data, timeout=TIMEOUT_S) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found
    except urllib.error.HTTPError as error:
        raise UsageError(f"Prometheus refuses `{expression}`: {error.read().decode()}") from error
    except OSError as error:
        raise UsageError(
            f"Prometheus cannot be reached url=`{url}`: {error}",
            fix="give the address at which it listens, such as http://127.0.0.1:9090",
        ) from error


def table(rows: list[tuple[Watched, list[dict[str, Any]]]]) -> str:
    """Return expressions and values as a table in Markdown."""
    lines = ["| what | expression | series | value |", "|---|---|---|---|"]
    for each, series in rows:
        value = each.needs or "**nothing**"
        if series:
            # A quantile of a histogram without observations is not a number.
            numbers = [found for one in series if not isnan(found := float(one["value"][1]))]
            value = f"{numbers[0]:.4g}" if numbers else "nan"
        expression = each.expression.replace("|", "\\|")
        lines.append(f"| {each.where} | `{expression}` | {len(series)} | {value} |")
    return "\n".join(lines) + "\n"
