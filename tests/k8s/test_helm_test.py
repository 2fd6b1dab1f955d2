"""Goal: `helm test` tells a cluster that cannot run a job from an API server that is busy for a moment.

Method: its script runs against an API server that is a dictionary, and loses answers.
"""

from __future__ import annotations

import io
import runpy
import urllib.error
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

import headgate

SCRIPT = Path(headgate.__file__).parent / "helm" / "headgate" / "files" / "run_test_job.py"


def script(call_once: Any) -> Any:
    """The script's `main`, whose requests go to `call_once`, without pauses."""
    made = runpy.run_path(str(SCRIPT))["main"]
    made.__globals__.update(_call_once=call_once, POLL_S=0)
    return made


def answer(code: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("https://api", code, "said so", Message(), io.BytesIO(b"why"))


def test_helm_test_goes_on_when_the_api_server_does_not_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each request fails once, after it had its effect; the job is made once, and deleted."""
    jobs: dict[str, int] = {}
    asked: list[tuple[str, str]] = []

    def call_once(method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        name = path.rpartition("/")[2] if body is None else body["metadata"]["name"]
        asked.append((method, name))
        if method == "POST":
            if name in jobs:
                raise answer(409)
            jobs[name] = 0
        elif name not in jobs:
            raise answer(404)
        elif method == "DELETE":
            del jobs[name]
        else:
            jobs[name] += 1
        if asked.count((method, name)) == 1:
            raise TimeoutError("the read operation timed out")
        return {"status": {"phase": "Finished" if jobs.get(name, 0) > 3 else "Running"}}

    script(call_once)("streams", "smoke", "1000", "300")
    assert jobs == {}
    assert asked.count(("POST", "smoke")) == 2
    said = capsys.readouterr().out
    assert "GET is repeated: the read operation timed out" in said
    assert said.count("Running") == 1


def test_helm_test_says_why_its_job_is_refused() -> None:

    def call_once(method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        raise answer(404 if method == "DELETE" else 422)

    with pytest.raises(SystemExit, match="the job was refused: why"):
        script(call_once)("streams", "smoke", "1000", "300")
