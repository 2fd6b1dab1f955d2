"""From a file to a job: manifests, scripts, overrides, and everything that can be wrong with them."""

from __future__ import annotations

import pytest

from headgate.tests.support.commands import ended_with

SCRIPT = """\
import headgate as hg
from helper import WANTED

flow = hg.Job("script")
numbers = flow.read(hg.connectors.numbers(100), name="numbers")
numbers.filter(lambda n: n < WANTED).write(hg.connectors.print_sink(guarantee="none"), name="out")

if __name__ == "__main__":
    raise SystemExit("a run of the script itself")
"""
MISTAKES = """\
apiVersion: headgate.io/v2
kind: StreamJob
metadata:
  name: -bad-
spec:
  parallelism: none
  checkpoint: {every: 10, storage: checkpoints}
  options: {exection.buffer-timeout: 1s}
  sources:
    ticks:
      generator: {fields: {n: sequense}, rate: 100}
    ghosts:
      kafkaa: {}
  operators:
    counts: {from: tics, keyBy: user, aggregate: {n: count()}}
    kept: {from: ticks, filtr: n > 0}
  sinks:
    out: {from: kept, blackhole: {}, guarantee: exactly-one}
    file: {from: ticks, parquet: {}, guarantee: exactly_once}
"""


def test_a_manifest_with_ten_mistakes_prints_ten_located_errors(cli) -> None:
    name = cli.write("bad.yaml", MISTAKES)
    checked = cli("validate", name)
    ended_with(checked, 2)
    assert checked.stdout == ""
    *errors, last = checked.stderr.split("error: ")[1:]
    errors.append(last)
    assert len(errors) >= 10
    assert all("  at bad.yaml:" in error for error in errors)
    assert checked.stderr.endswith(f"bad.yaml: {len(errors)} mistakes\n")

    run = cli("run", name, "--cluster", "in-process")
    ended_with(run, 2)
    assert run.stderr.count("  at bad.yaml:") == len(errors)
    assert not (cli.directory / "checkpoints").exists()
    assert not (cli.directory / "run").exists()


def test_validate_and_explain_of_a_good_manifest(cli, ticker: str) -> None:
    checked = cli("validate", ticker)
    assert (checked.returncode, checked.stdout) == (0, "ticker.yaml: ok, job ticker\n")
    explained = cli("explain", ticker, "-p", "3").stdout
    assert "job ticker: parallelism 3, 128 key groups" in explained
    assert "hash(user)" in explained
    assert "out: exactly-once" in explained
    assert not (cli.directory / "checkpoints").exists()


def test_a_script_with_one_job_under_any_name(cli) -> None:
    cli.write("helper.py", "WANTED = 3\n")
    name = cli.write("script.py", SCRIPT)
    done = cli("run", name, "--cluster", "in-process")
    assert (done.returncode, done.stdout) == (0, "0\n1\n2\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("flow = hg", "flow = other = hg"), None),
        (("flow = hg", "second = hg.Job('b')\nflow = hg"), "more than one job: `second`, `flow`"),
        (("flow = hg", "second = hg.Job('b')\njob = flow = hg"), None),
        (("if __name__ ==", "flow.run()\nif __name__ =="), "the script runs its job while it is"),
        (("flow.read", "nothing.read"), "cannot be loaded: NameError: name 'nothing' is not"),
        (("name=", "name= ="), "cannot be loaded: SyntaxError"),
        (("flow = hg", "raise SystemExit('no')\nflow = hg"), "cannot be loaded: SystemExit: no"),
        (
            ("flow = hg", "raise BaseException('no')\nflow = hg"),
            "cannot be loaded: BaseException: no",
        ),
        (
            ("flow = hg", "raise type('Stop', (KeyboardInterrupt,), {})('no')\nflow = hg"),
            "cannot be loaded: Stop: no",
        ),
    ],
)
def test_scripts(cli, change: tuple[str, str], message: str | None) -> None:
    cli.write("helper.py", "WANTED = 3\n")
    checked = cli("validate", cli.write("script.py", SCRIPT.replace(*change)))
    if message is None:
        ended_with(checked, 0)
        return
    ended_with(checked, 2)
    assert message in checked.stderr
    assert f"  at {'' if 'more than' in message else cli.directory}" in checked.stderr
    assert "Traceback" not in checked.stderr


def test_files_that_are_no_jobs(cli) -> None:
    empty = cli("run", cli.write("nothing.py", "x = 1\n"))
    ended_with(empty, 2)
    assert "the script defines no job" in empty.stderr
    assert "job = hg.Job(...)" in empty.stderr
    assert "no such file" in cli("run", "missing.yaml").stderr
    assert "neither a manifest" in cli("run", cli.write("job.json", "{}")).stderr
    assert "hides a module" in cli("run", cli.write("json.py", "x = 1")).stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("heartbeat.intervall=1s", "did you mean `heartbeat.interval`?"),
        ("heartbeat.interval=1", "bad option value key=`heartbeat.interval` value=`1`"),
        ("heartbeat.interval", "write -D key=value"),
    ],
)
def test_bad_settings_are_refused(cli, ticker: str, setting: str, message: str) -> None:
    done = cli("run", ticker, "--cluster", "in-process", "-D", setting)
    ended_with(done, 2)
    assert message in done.stderr
    assert not (cli.directory / "run").exists()


def test_settings_win_over_the_file(cli, ticker: str) -> None:
    explained = cli(
        "explain", ticker,
        "-D", "execution.checkpointing.interval=7s",
        "-D", "pipeline.max-parallelism=64",
    ).stdout  # fmt: skip
    assert "checkpoints: every 7s" in explained
    assert "64 key groups" in explained
    twice = cli("explain", ticker, "-p", "2", "-D", "parallelism.default=3")
    ended_with(twice, 2)
    assert "parallelism is set twice" in twice.stderr


def test_an_unknown_cluster(cli, ticker: str) -> None:
    done = cli("run", ticker, "--cluster", "moon")
    ended_with(done, 2)
    assert "unknown cluster cluster=`moon`" in done.stderr


def test_options_and_version(cli) -> None:
    assert "execution.checkpointing.interval\n    duration, default unset" in cli("options").stdout
    assert "| `heartbeat.timeout` |" in cli("options", "--markdown").stdout
    assert cli("--version").stdout.startswith("headgate 0.")
    ended_with(cli("fly"), 2)


def test_a_script_that_ends_the_process_is_named_with_its_line(cli) -> None:
    """Native code of a library may crash: Polars does while a chain of 20,000 `.abs()` is built."""
    crash = "import ctypes\n\n\ndef crash():\n    ctypes.string_at(0)\n\n\ncrash()\n"
    done = cli("validate", cli.write("crashes.py", crash))
    assert done.returncode < 0
    assert "Segmentation fault" in done.stderr
    assert 'crashes.py", line 5 in crash' in done.stderr
    assert 'crashes.py", line 8 in <module>' in done.stderr
