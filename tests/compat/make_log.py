"""Makes the job log of `vX.Y/log`, with the checkpoints that it names. Run by hand: see `README.md`."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def load(path: Path) -> Any:
    """A module by its path."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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

    load(HERE.parent / "integration" / "conftest.py").Lab(Path(tempfile.mkdtemp())).run(job, script)
    for path in sorted(target.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:8,} {path.relative_to(target)}")


if __name__ == "__main__":
    main()
