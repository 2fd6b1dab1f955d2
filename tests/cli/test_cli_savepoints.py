"""`headgate savepoint ...`, `stop --savepoint`, `run --from` and `rescale`, as a user types them."""

from __future__ import annotations

import json

from headgate.tests.support.commands import ended_with

IN_PROCESS = ("--cluster", "in-process")


def path_in(text: str) -> str:
    """The path behind `savepoint: ` in what a verb printed."""
    return text.split("savepoint: ")[1].split(" (")[0].splitlines()[0]


def test_a_savepoint_from_its_making_to_its_end(cli, ticker: str) -> None:
    run = cli.start("run", ticker, *IN_PROCESS)
    run.wait_for("RUNNING")
    first = path_in(cli("savepoint", "take", "ticker", "kept").stdout)
    assert first.startswith(str(cli.directory / "kept" / "savepoint-ticker-"))

    rescaled = cli("rescale", "ticker", "-p", "2")
    assert rescaled.stdout.startswith("job ticker runs at parallelism 2 from checkpoint ")
    assert "it paused for " in rescaled.stdout
    assert json.loads(cli("list", "--json").stdout)[0]["parallelism"] == 2
    refused = cli("rescale", "ticker", "-p", "2")
    ended_with(refused, 2)
    assert "nothing would change" in refused.stderr

    stopped = cli("stop", "ticker", "--savepoint", "kept")
    second = path_in(stopped.stdout)
    assert "job ticker stopped with checkpoint" in stopped.stdout
    assert run.end()[0] == 0

    shown = cli("savepoint", "inspect", first).stdout
    assert "savepoint 1 of job ticker" in shown
    assert "format canonical" in shown
    assert "counts" in shown
    assert "user string" in shown
    facts = json.loads(cli("savepoint", "inspect", second, "--json").stdout)
    assert facts["job"] == "ticker"
    by_name = {operator["operator"]: operator for operator in facts["operators"]}
    assert by_name["counts"]["parallelism"] == 2
    assert by_name["counts"]["states"][0]["rows"] == 10
    assert by_name["ticks"]["states"][0]["kind"] == "split"

    changes = cli("savepoint", "diff", first, second).stdout
    assert "parallelism: 1 -> 2" in changes
    assert cli("savepoint", "diff", first, first).stdout == "no difference\n"

    again = cli.start("run", ticker, *IN_PROCESS, "--from", first)
    restored = again.wait_for("restored savepoint ")
    bytes_ = json.loads(cli("savepoint", "inspect", first, "--json").stdout)["bytes"]
    assert restored.endswith(f"restored savepoint 1 in {first} ({bytes_:,} bytes)")
    again.wait_for("RUNNING")
    ended_with(cli("cancel", "ticker"), 0)
    assert again.end()[0] == 130

    assert cli("savepoint", "dispose", first).stdout.startswith(
        "deleted the savepoint of job ticker"
    )
    gone = cli("savepoint", "inspect", first)
    ended_with(gone, 1)
    assert "no such directory" in gone.stderr


def test_check_says_before_anything_starts_whether_a_job_can_restore(cli, ticker: str) -> None:
    run = cli.start("run", ticker, *IN_PROCESS)
    run.wait_for("RUNNING")
    path = path_in(cli("stop", "ticker", "--savepoint", "kept").stdout)
    run.end()

    good = cli("savepoint", "check", path, ticker)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.endswith(f"ok, job ticker can restore {path}\n")

    text = (cli.directory / ticker).read_text()
    renamed = cli.write("renamed.yaml", text.replace("counts", "totals"))
    bad = cli("savepoint", "check", path, renamed)
    ended_with(bad, 1)
    assert "unclaimed: counts.running" in bad.stdout
    assert "new: totals.running" in bad.stdout
    ended_with(cli("savepoint", "check", path, renamed, "--allow-non-restored-state"), 0)

    retyped = cli.write(
        "retyped.yaml", text.replace("{kind: pattern, prefix: u, distinct: 10}", "sequence")
    )
    wrong = cli("savepoint", "check", path, retyped)
    ended_with(wrong, 1)
    assert "incompatible: operator `counts`" in wrong.stdout

    wide = cli("savepoint", "check", path, ticker, "-p", "200")
    ended_with(wide, 1)
    assert "wrong: parallelism 200 is above the 128 key groups" in wide.stdout


def test_the_record_of_a_job_that_lives_is_not_removed(cli, ticker: str) -> None:
    run = cli.start("run", ticker, *IN_PROCESS)
    run.wait_for("RUNNING")
    (record,) = (cli.directory / "run").glob("job-*.json")
    text = record.read_text()
    # Records of older versions have neither a format nor a checksum.
    broken = {k: v for k, v in json.loads(text).items() if k not in ("format", "checksum")}
    broken["addresses"] = ["tcp:127.0.0.1:1"]
    record.write_text(json.dumps(broken))
    assert json.loads(cli("list", "--json").stdout)[0]["status"] == "NOT ANSWERING"
    assert record.exists()
    broken["addresses"] = ["unix:/run/changed.rest"]
    record.write_text(json.dumps(broken))
    assert json.loads(cli("list", "--json").stdout)[0]["status"] == "NOT ANSWERING"
    assert record.exists()
    record.write_text(text.replace("unix:", "unix;"))
    damaged = cli("list")
    ended_with(damaged, 1)
    assert "no job runs" not in damaged.stdout
    assert f"a record of a running job is damaged name=`{record}`" in damaged.stderr
    assert "its checksum is" in cli("stop", "ticker").stderr
    assert record.exists()
    record.write_text(text)
    ended_with(cli("cancel", "ticker"), 0)
    run.end()


def test_files_of_checkpoints_and_savepoints_are_verified(cli, ticker: str) -> None:
    run = cli.start(
        "run",
        ticker,
        *IN_PROCESS,
        "-D",
        "execution.checkpointing.data-inline-threshold=0b",
        "-D",
        "execution.checkpointing.file-merging.enabled=false",
    )
    run.wait_for("RUNNING")
    assert cli("checkpoint", "ticker").stdout.startswith("job ticker: checkpoint 1 completed in ")
    assert cli("checkpoint", "take", "ticker").stdout.startswith("job ticker: checkpoint 2 ")
    savepoint = path_in(cli("stop", "ticker", "--savepoint", "kept").stdout)
    assert run.end()[0] == 0

    for path in ("checkpoints/ticker", savepoint):
        sound = cli("checkpoint", "verify", path)
        assert (sound.returncode, "0 damaged" in sound.stdout) == (0, True)
    damaged = next((cli.directory / "checkpoints").rglob("*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    ended_with(cli("checkpoint", "verify", "checkpoints/ticker", "--sizes-only"), 0)
    found = cli("checkpoint", "verify", "checkpoints/ticker")
    ended_with(found, 1)
    assert "corrupt" in found.stdout
    assert damaged.name in found.stdout
    facts = json.loads(cli("checkpoint", "verify", "checkpoints/ticker", "--json").stdout)
    assert [file["damage"] for file in facts["damaged"]] == ["corrupt"]
    assert facts["orphans"] == {}
