"""Dashboards as the JSON that Grafana imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

SCHEMA_VERSION: Final = 39
PanelType: TypeAlias = Literal["stat", "timeseries", "table", "heatmap", "state-timeline"]
JOB: Final = 'namespace=~"$namespace",job_name=~"$job_name"'
"""What `$J` stands for in expressions."""
TASK: Final = JOB + ',task=~"$task"'
"""What `$T` stands for."""
FLEET: Final = 'namespace=~"$namespace"'
"""What `$F` stands for."""
OPERATOR: Final = "the Kubernetes operator exports it, and a local job has none"
AUTOSCALER: Final = "the autoscaler exports it"
_WIDTH: Final = 24
_COLUMNS: Final = 2
_HEIGHT: Final = 8


def expanded(expression: str) -> str:
    """Return an expression with its abbreviations replaced by label matchers."""
    return expression.replace("$J", JOB).replace("$T", TASK).replace("$F", FLEET)


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel.

    Attributes:
        expression: PromQL with `$J`, `$T` or `$F` for label matchers.
        legend: the name of its series.
    """

    expression: str
    legend: str = "{{job_name}}"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: the title.
        type: the kind of panel.
        unit: Grafana's name for the unit.
        description: one or two sentences that say how to react to the values.
        queries: at least one.
        needs: why a running job alone has no series for it; empty: it has.
    """

    title: str
    type: PanelType
    unit: str
    description: str
    queries: tuple[Query, ...]
    needs: str = ""

    def as_json(self, number: int) -> dict[str, Any]:
        """The panel, in two columns from the top on."""
        row, column = divmod(number, _COLUMNS)
        width = _WIDTH // _COLUMNS
        custom: dict[str, Any] = {}
        options: dict[str, Any] = {}
        if self.type == "timeseries":
            custom = {"fillOpacity": 10, "showPoints": "never", "spanNulls": False}
            legend = {
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["lastNotNull", "max"],
            }
            options = {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        elif self.type == "stat":
            options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
        return {
            "id": number + 1,
            "title": self.title,
            "description": self.description,
            "type": self.type,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "gridPos": {"x": column * width, "y": row * _HEIGHT, "w": width, "h": _HEIGHT},
            "fieldConfig": {
                "defaults": {"unit": self.unit, "min": 0, "custom": custom},
                "overrides": [],
            },
            "options": options,
            "targets": [self._target(each, query) for each, query in enumerate(self.queries)],
        }

    def _target(self, number: int, query: Query) -> dict[str, Any]:
        whole = self.type == "table"
        return {
            "refId": chr(ord("A") + number),
            "expr": expanded(query.expression),
            "legendFormat": query.legend,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "instant": whole,
            "range": not whole,
            "format": "heatmap" if self.type == "heatmap" else "table" if whole else "time_series",
        }


@dataclass(frozen=True, slots=True)
class Variable:
    """A selection at the top of a dashboard, among the values of a label."""

    name: str
    metric: str
    several: bool = True

    def as_json(self) -> dict[str, Any]:
        """The variable."""
        query = f"label_values({self.metric}, {self.name})"
        return {
            "name": self.name,
            "label": self.name.replace("_", " "),
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": {"query": query, "refId": "StandardVariableQuery"},
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "multi": self.several,
            "includeAll": self.several,
            # Outside of Kubernetes there may be no such label, which `.*` allows.
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"} if self.several else {},
        }


NAMESPACE: Final = Variable("namespace", "headgate_job_info")
JOB_NAME: Final = Variable("job_name", 'headgate_job_info{namespace=~"$namespace"}', several=False)
TASK_NAME: Final = Variable("task", f"headgate_task_records_in_total{{{JOB}}}")
_DATASOURCE: Final = {
    "name": "datasource",
    "label": "data source",
    "type": "datasource",
    "query": "prometheus",
    "current": {},
}
_ANNOTATIONS: Final = {
    "Checkpoints": (
        "changes(headgate_checkpoint_last_id{$J}[$__rate_interval]) > 0",
        "blue",
        False,
    ),
    "Restarts": ("increase(headgate_job_restarts_total{$J}[$__rate_interval]) > 0", "red", True),
    "Rescalings": ("changes(headgate_job_parallelism{$J}[$__rate_interval]) > 0", "orange", True),
}


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard; `uid` never changes, so that links to it stay valid."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    panels: tuple[Panel, ...]

    def as_json(self) -> dict[str, Any]:
        """The dashboard in the form that Grafana imports."""
        of_a_job = JOB_NAME in self.variables
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["headgate"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "links": [
                {
                    "title": "headgate",
                    "type": "dashboards",
                    "tags": ["headgate"],
                    "asDropdown": True,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "templating": {"list": [_DATASOURCE, *(each.as_json() for each in self.variables)]},
            "annotations": {"list": _annotations() if of_a_job else []},
            "panels": [panel.as_json(number) for number, panel in enumerate(self.panels)],
        }


def _annotations() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "expr": expanded(expression),
            "iconColor": colour,
            "enable": shown,
            "titleFormat": name,
        }
        for name, (expression, colour, shown) in _ANNOTATIONS.items()
    ]
