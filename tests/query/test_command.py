"""`headgate query`: what it asks the job, and how it prints the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from headgate.errors import UsageError
from headgate.runtime.cli import verbs
from headgate.runtime.cli.app import app

STATES = [
    {"name": "sums", "step": "totals", "kind": "running", "key": {"user": "str", "n": "int"}},
    {"name": "last", "step": "last", "kind": "reduce", "key": None},
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the job is asked; it has a value for each key but `nobody`."""
    seen: list[Any] = []

    def request(job: str, verb: str, where: Any = None, **arguments: Any) -> dict[str, Any]:
        seen.append((job, verb, arguments))
        if verb == "states":
            return {"states": STATES if job == "clicks" else []}
        found = arguments["key"] != "nobody"
        return {"found": found, "value": {"n": 1, "of": "é"} if found else None}

    monkeypatch.setattr(verbs, "request", request)
    return seen


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["query", *arguments])


def test_a_value_is_printed_as_json(asked: list[Any]) -> None:
    done = run("clicks", "sums", "u1")
    assert (done.exit_code, done.stdout) == (0, '{"n": 1, "of": "é"}\n')
    assert asked == [("clicks", "query", {"state": "sums", "key": "u1", "level": "live"})]
    assert run("clicks", "sums", "u1", "--level", "committed").exit_code == 0
    assert asked[-1][2]["level"] == "committed"
    assert run("clicks", "sums", "--", "-7").exit_code == 0
    assert asked[-1][2]["key"] == "-7"


def test_a_key_without_a_value_is_no_error(asked: list[Any]) -> None:
    done = run("clicks", "sums", "nobody")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "sums has nothing for this key\n"
    done = run("clicks", "sums", "nobody", "--json")
    assert json.loads(done.stdout) == {"found": False, "value": None}


def test_states_are_listed(asked: list[Any]) -> None:
    lines = run("clicks").stdout.splitlines()
    assert lines[0].split() == ["state", "kind", "step", "key"]
    assert lines[1].split() == ["sums", "running", "totals", "user:", "str,", "n:", "int"]
    assert lines[2].split() == ["last", "reduce", "last", "JSON"]
    assert json.loads(run("clicks", "--json").stdout) == STATES
    assert run("other").stdout == "the job has no queryable state\n"


def test_a_query_needs_a_key(asked: list[Any]) -> None:
    error = run("clicks", "sums").exception
    assert isinstance(error, UsageError)
    assert "has no key" in error.message
    assert asked == []
