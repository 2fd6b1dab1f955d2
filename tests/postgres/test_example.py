"""The example of a job from PostgreSQL into PostgreSQL: its totals follow all changes of the orders."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from headgate.testing.servers.postgres import PostgresServer
from headgate.tests.postgres.test_cdc import drop
from headgate.tests.support.modules import load

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "order_totals.py"
GUARD_S = 120.0
RIGHT = "SELECT customer, count(*), sum(amount) FROM orders GROUP BY 1 ORDER BY 1"
FOUND = "SELECT customer, orders, total FROM totals WHERE orders > 0 ORDER BY 1"


def test_the_totals_follow_the_orders(
    database: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, customer text, amount numeric(10,2))",
        "ALTER TABLE orders REPLICA IDENTITY FULL",
        "INSERT INTO orders SELECT n, 'c' || n % 5, n * 1.25 FROM generate_series(1, 50) n",
    )
    monkeypatch.setenv("DATABASE", database.dsn)
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path))
    monkeypatch.setenv("CHECKPOINT_EVERY", "200ms")
    job = load(EXAMPLE).job
    dice = random.Random(1)

    def change() -> str:
        key, customer = dice.randrange(1, 70), f"c{dice.randrange(6)}"
        return dice.choice(
            (
                f"UPDATE orders SET customer = '{customer}', amount = amount + 1 WHERE id = {key}",
                f"UPDATE orders SET id = id + 1000 WHERE id = {key}",
                f"DELETE FROM orders WHERE id = {key}",
                f"INSERT INTO orders VALUES ({key}, '{customer}', 7.5) ON CONFLICT DO NOTHING",
            )
        )

    async def right() -> None:
        there = "SELECT to_regclass('totals')"
        while database.execute(there) == [(None,)] or (
            database.execute(FOUND) != database.execute(RIGHT)
        ):
            assert not running.done(), running.result()
            await asyncio.sleep(0.1)

    async def scenario() -> None:
        nonlocal running
        async with asyncio.timeout(GUARD_S):
            running = asyncio.create_task(job.run_async())
            await right()
            database.execute(*(change() for _ in range(200)))
            await right()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    running: asyncio.Task[object]
    asyncio.run(scenario())
    drop(database, "order_totals")


def test_the_page_shows_it() -> None:
    page, code = (ROOT / "docs" / "postgres.md").read_text(), EXAMPLE.read_text()
    shown = code[code.index("def effects") : code.index('if __name__ == "__main__"')]
    assert shown.strip() in page
