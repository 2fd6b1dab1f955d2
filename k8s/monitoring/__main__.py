"""`python -m headgate.k8s.monitoring write [DIRECTORY]`, `... rules`, or `... evaluate URL --job NAME`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from ...errors import HeadgateError
from .alerts import rules
from .evaluate import filled, query, table, watched
from .files import generated


def main() -> int:
    """Write the files of the chart, or print the values of all expressions."""
    parser = argparse.ArgumentParser(prog="python -m headgate.k8s.monitoring", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    write = verbs.add_parser("write", help="write dashboards and rules into the chart")
    write.add_argument("directory", nargs="?", type=Path, default=Path(), help="of the repository")
    plain = verbs.add_parser(
        "rules", help="print the alert rules for a Prometheus without the chart"
    )
    plain.add_argument(
        "--threshold", action="append", default=[], type=_threshold, metavar="NAME=NUMBER"
    )
    plain.add_argument(
        "--runbook-url", default="", help="where the pages of the alerts can be read"
    )
    evaluate = verbs.add_parser("evaluate", help="print each expression and its value as a table")
    evaluate.add_argument("url", help="of Prometheus, such as http://127.0.0.1:9090")
    evaluate.add_argument("--job", default=".*", help="the name of a job")
    evaluate.add_argument("--namespace", default=".*")
    evaluate.add_argument("--interval", default="1m", help="what $__rate_interval stands for")
    asked = parser.parse_args()
    if asked.verb == "write":
        for path, text in generated().items():
            target = asked.directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            print(target)
        return 0
    if asked.verb == "rules":
        print(
            yaml.safe_dump(rules(dict(asked.threshold), asked.runbook_url), sort_keys=False), end=""
        )
        return 0
    rows = []
    for each in watched():
        expression = filled(
            each.expression, namespace=asked.namespace, job_name=asked.job, interval=asked.interval
        )
        rows.append((each, query(asked.url, expression)))
    print(table(rows), end="")
    return 0


def _threshold(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    return name, float(number)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HeadgateError as error:
        sys.exit(str(error))
