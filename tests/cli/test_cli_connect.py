"""`headgate validate --connect`: the services of all sources and sinks are asked, and nothing is started.

What each connector checks is part of the conformance kit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from headgate.runtime.cli.app import app
from headgate.tests.support.connector_cases import NOWHERE

MANIFEST = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata:
  name: connecting
spec:
  checkpoint: {every: 10s, storage: checkpoints}
  sources:
    ticks:
      generator: {fields: {n: sequence}}
    lines:
      text: {path: lines}
  sinks:
    numbers: {from: ticks, json: {path: numbers}, guarantee: exactly_once}
    sent:
      from: lines
      http: {url: URL, headers: {Authorization: "env:TOKEN"}}
      guarantee: at_least_once
"""
SCRIPT = """\
import threading

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.connectors.collections import ListSource


class Odd(ListSource):
    def check_connection(self, options):
        if HANGS:
            threading.Event().wait()
        raise KeyError("open sesame")


job = hg.Job("odd")
source = from_list([1])
source.__class__ = Odd
job.read(source, name="odd").write(blackhole(), name="out")
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.txt").write_text("a\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "open sesame")
    return tmp_path


def validate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["validate", *arguments])


def test_each_source_and_sink_has_a_line_with_its_place(directory: Path) -> None:
    (directory / "job.yaml").write_text(MANIFEST.replace("URL", f"http://{NOWHERE}"))
    result = validate("job.yaml", "--connect")
    assert result.exit_code == 1, result.output
    assert result.stdout == (
        "job.yaml: ok, job connecting\n"
        "ok: source `ticks`: nothing to connect to, at job.yaml:8\n"
        "ok: source `lines`: 1 file, at job.yaml:10\n"
        "ok: sink `numbers`: the directory will be made, at job.yaml:13\n"
    )
    assert f"error: sink `sent`: the service cannot be reached url=`http://{NOWHERE}`" in (
        result.stderr
    )
    assert result.stderr.endswith(
        "\n  at job.yaml:16\n  check the address, and that the service runs\n"
    )
    assert "sesame" not in result.output
    assert sorted(file.name for file in directory.iterdir()) == ["job.yaml", "lines"]


def test_the_exit_code_is_0_if_all_can_be_used(directory: Path) -> None:
    end = MANIFEST.index("    sent:\n")
    (directory / "job.yaml").write_text(MANIFEST[:end])
    assert validate("job.yaml").exit_code == 0
    result = validate("job.yaml", "--connect")
    assert (result.exit_code, result.stderr) == (0, "")


def test_nothing_is_asked_about_a_job_with_mistakes(directory: Path) -> None:
    (directory / "job.yaml").write_text(MANIFEST.replace("{from: ticks", "{from: tocks"))
    result = validate("job.yaml", "--connect")
    assert result.exit_code == 2
    assert result.stdout == ""


@pytest.mark.parametrize("hangs", [False, True])
def test_connectors_that_do_not_keep_their_promise(
    directory: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    name = f"odd_{hangs}.py".lower()
    (directory / name).write_text(SCRIPT.replace("HANGS", str(hangs)))
    result = validate(name, "--connect", "--connect-timeout", "200ms" if hangs else "60s")
    assert result.exit_code == 1, result.output
    why = "there was no answer within 0.2 s" if hangs else f"failed with KeyError in {directory}"
    assert why in result.stderr
    assert f"at {directory / name}:" in result.stderr or f"at {name}:" in result.stderr
    assert "sesame" not in result.output
