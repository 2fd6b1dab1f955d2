"""Makes the job log of `vX.Y/log`, with the checkpoints that it names. Run by hand: see `README.md`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from headgate.tests.support.lab import Lab
from headgate.tests.support.modules import load

HERE = Path(__file__).parent


def main() -> None:
    """Run the job for a while, complete two checkpoints, and cancel it: what it leaves is kept."""
    log_job = load(HERE / "log_job.py")
    target = HERE / sys.argv[1] / "log"
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
    for path in sorted(target.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:8,} {path.relative_to(target)}")


if __name__ == "__main__":
    main()
