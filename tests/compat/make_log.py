"""Makes the job logs of `vX.Y/log` and `vX.Y/in-flight`, with the checkpoints that they name.

Run by hand: see `README.md`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from headgate.tests.support.lab import Lab
from headgate.tests.support.modules import load

HERE = Path(__file__).parent


def make_log(target: Path) -> None:
    """Run the job for a while, complete two checkpoints, and cancel it: what it leaves is kept."""
    log_job = load(HERE / "log_job.py")
    job, _ = log_job.make_job(str(target), parallelism=2, rate=50)

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        for part in (0.2, 0.5):
            while (
                sum(v["records_in"] for v in (await running.status())["vertices"])
                < part * log_job.ROWS
            ):
                await running.tick()
            await running.request("checkpoint")
        await running.request("cancel")

    Lab(Path(tempfile.mkdtemp())).run(job, script)


def make_in_flight(target: Path) -> None:
    """Run the job until a checkpoint has records on their way at both ends of each exchange."""
    job, _ = load(HERE / "in_flight_job.py").make_job(str(target), parallelism=2, pause=0.02)

    async def script(running: Any) -> None:
        await running.until("status", status="RUNNING")
        ends: set[tuple[str, str]] = set()
        while len(ends) < 4:
            await running.request("checkpoint")
            manifest = running.coordinator._context.env.log.view.newest.manifest
            handles = [each for each in manifest.handles() if each.channel is not None]
            ends = {(each.channel.target, each.kind) for each in handles}
        await running.request("cancel")

    Lab(Path(tempfile.mkdtemp())).run(job, script)


def main() -> None:
    """Make both, and list their files."""
    version = HERE / sys.argv[1]
    make_log(version / "log")
    make_in_flight(version / "in-flight")
    for path in sorted(version.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:8,} {path.relative_to(version)}")


if __name__ == "__main__":
    main()
