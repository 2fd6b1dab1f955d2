"""The generated files of the chart, and the rules that dashboards keep."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

import headgate as hg
from headgate.errors import UsageError
from headgate.k8s.monitoring.alerts import ALERTS, RUNBOOKS, THRESHOLDS, rules, template
from headgate.k8s.monitoring.boards import BOARDS
from headgate.k8s.monitoring.evaluate import watched
from headgate.k8s.monitoring.files import generated
from headgate.runtime.observe.catalogue import BY_NAME
from headgate.tests.support.commands import ended_with
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
        runbook = alert.as_rule()["annotations"]["runbook"]
        assert runbook == f"{RUNBOOKS}/{alert.name}.md"
        assert (ROOT / runbook).is_file()
        headings = re.findall(r"^#+ (.*)$", pages[alert.name], re.MULTILINE)
        assert headings == [alert.name, "Cause", "Look at", "Do"]


def test_an_alert_leads_to_no_site_unless_one_is_named() -> None:
    """There is no address at which these pages can be read everywhere."""
    assert "http" not in json.dumps(rules())
    (group,) = rules(runbook_url="https://wiki.example/runbooks/")["groups"]
    for rule in group["rules"]:
        page = f"https://wiki.example/runbooks/{rule['alert']}.md"
        assert rule["annotations"]["runbook_url"] == page


def test_every_threshold_is_used_and_known() -> None:
    text = json.dumps(template())
    assert set(re.findall(r"<(\w+)>", text)) == {each.name for each in THRESHOLDS}
    assert not re.search(r"<\w+>", json.dumps(rules()))
    with pytest.raises(UsageError, match="no threshold 'skw'"):
        rules({"skw": 1})
    page = (ROOT / "docs" / "monitoring.md").read_text()
    values = (ROOT / "helm" / "headgate" / "values.yaml").read_text()
    schema = json.loads((ROOT / "helm" / "headgate" / "values.schema.json").read_text())
    section = schema["properties"]["metrics"]["properties"]["prometheusRule"]["properties"]
    known = section["thresholds"]["properties"]
    set_ = yaml.safe_load(values)["metrics"]["prometheusRule"]["thresholds"]
    assert set_ == {each.name: each.default for each in THRESHOLDS}
    assert known.keys() == set_.keys()
    for each in THRESHOLDS:
        assert f"      # -- {each.meaning}\n      {each.name}: {each.default:g}\n" in values
        assert ("maximum" in known[each.name]) == each.is_share
        assert f"| `{each.name}` | {each.default:g} | {each.meaning} |" in page
    names = [alert.name for alert in ALERTS]
    assert section["disabled"]["items"]["enum"] == names
    assert section["alerts"]["propertyNames"]["enum"] == names


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
    ended_with(checked, 0)
    assert f"{len(ALERTS)} rules found" in checked.stdout
