"""The generated files of the chart, and the rules that dashboards keep."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

import headgate as hg
from headgate.k8s.monitoring.alerts import ALERTS, RUNBOOKS, rules
from headgate.k8s.monitoring.boards import BOARDS
from headgate.k8s.monitoring.evaluate import watched
from headgate.k8s.monitoring.files import generated
from headgate.runtime.observe.catalogue import BY_NAME
from headgate.tests.support.prometheus import promtool

ROOT = Path(hg.__file__).resolve().parent
METRIC = re.compile(r"headgate_[a-z0-9_]+")


@pytest.mark.parametrize("path", generated(), ids=str)
def test_committed_files_are_current(path: Path) -> None:
    assert (ROOT / path).read_text() == generated()[path], "python -m headgate.k8s.monitoring write"


def test_nothing_else_lies_beside_them() -> None:
    for folder in {path.parent for path in generated()}:
        found = {file.relative_to(ROOT) for file in (ROOT / folder).iterdir()}
        assert found == {path for path in generated() if path.parent == folder}


def test_dashboards_fit_into_a_config_map() -> None:
    sizes = [len(text) for path, text in generated().items() if path.suffix == ".json"]
    assert len(sizes) == 5
    assert sum(sizes) < 900 * 1024


def test_every_metric_that_is_shown_exists() -> None:
    """Those of the Kubernetes operator and the autoscaler are theirs to promise."""
    for each in watched():
        if each.needs:
            continue
        for name in METRIC.findall(each.expression):
            plain = re.sub(r"_(bucket|sum|count)$", "", name.removeprefix("headgate_"))
            metric = BY_NAME.get(plain.removesuffix("_total"))
            assert metric is not None, (each.where, name)
            assert name.startswith(metric.sample), (each.where, name)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_dashboard_is_fit_for_any_grafana(board: object) -> None:
    made = board.as_json()  # type: ignore[attr-defined]
    assert made["templating"]["list"][0]["type"] == "datasource"
    for panel in made["panels"]:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            ranges = re.findall(r"\[([^]]*)\]", target["expr"])
            if panel["type"] != "table":
                assert set(ranges) <= {"$__rate_interval"}, (panel["title"], ranges)
    assert "${DS_" not in json.dumps(made)


def test_every_alert_has_a_page_that_says_what_to_do() -> None:
    pages = {page.stem: page.read_text() for page in (ROOT / "docs" / "runbooks").glob("H*.md")}
    assert set(pages) == {alert.name for alert in ALERTS}
    for alert in ALERTS:
        url = alert.as_rule()["annotations"]["runbook_url"]
        assert url == f"{RUNBOOKS}{alert.name}.md"
        headings = re.findall(r"^#+ (.*)$", pages[alert.name], re.MULTILINE)
        assert headings == [alert.name, "Cause", "Look at", "Do"]


def test_the_pages_have_every_dashboard_alert_and_expression() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    values = (ROOT / "docs" / "monitoring_values.md").read_text()
    for board in BOARDS:
        assert f"| `{board.uid}` | {board.description} | {len(board.panels)} |" in page
    for alert in ALERTS:
        row = f"| [{alert.name}](runbooks/{alert.name}.md) | {alert.severity} | {alert.after} |"
        assert row in page
    for each in watched():
        expression = each.expression.replace("|", "\\|")
        assert f"| {each.where} | `{expression}` |" in values, "see the head of that page"


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules()))
    checked = promtool("check", "rules", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout
