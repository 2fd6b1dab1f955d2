"""The jobs of the tutorial on changes of a table run as its page shows them, on real servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.errors import HeadgateError
from headgate.testing.servers import kafka, postgres
from headgate.testing.servers.programs import NotAvailableError
from headgate.tests.docs.test_docs import ROOT, blocks
from headgate.tests.support.skips import skip_or_fail

PAGE = ROOT / "docs" / "tutorials" / "cdc.md"
WAIT_S = 120


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[postgres.PostgresServer, kafka.KafkaServer]]:
    """A database and a broker."""
    with contextlib.ExitStack() as stack:
        try:
            database = stack.enter_context(postgres.running(tmp_path / "database"))
            broker = stack.enter_context(kafka.running(tmp_path / "broker"))
        except NotAvailableError as error:
            skip_or_fail(str(error))
        yield database, broker


def with_addresses(text: str, addresses: dict[str, str]) -> str:
    """Return the code of a job with the addresses of this test; the job is made, and does not run."""
    for shown, used in addresses.items():
        assert shown in text, shown
        text = text.replace(shown, used)
    assert text.count("job.run()\n") == 1
    return text.replace("job.run()\n", "")


def rows_of_the_table(catalog_uri: str) -> list[tuple[Any, ...]]:
    """Return the rows of the Iceberg table, in order."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchTableError

    with load_catalog("default", uri=catalog_uri) as catalog:
        try:
            table = catalog.load_table("shop.orders").scan().to_arrow()
        except NoSuchTableError:
            return []
    columns = ("op", "id", "version", "status", "cents")
    return sorted(zip(*(table.column(name).to_pylist() for name in columns), strict=True))


def test_each_change_of_the_table_is_in_iceberg_once(servers: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyiceberg")
    database, broker = servers
    (statements,) = [each.text for each in blocks(PAGE) if each.language == "sql"]
    database.execute(*filter(str.strip, statements.split(";")))
    broker.create_topic("orders", 2)
    (tmp_path / "lake").mkdir()
    catalog_uri = f"sqlite:///{tmp_path}/lake/catalog.db"
    storage = {"s3://shop/checkpoints": str(tmp_path / "checkpoints")}
    topic = {"broker:9092": broker.bootstrap}
    to_kafka, to_iceberg = (each.text for each in blocks(PAGE) if each.language == "python")
    first: dict[str, Any] = {}
    second: dict[str, Any] = {}
    source = {"postgresql://reader@db/shop": database.dsn}
    exec(with_addresses(to_kafka, source | topic | storage), first)
    lake = {"sqlite:////lake/catalog.db": catalog_uri, '"/lake"': f'"{tmp_path}/lake"'}
    exec(with_addresses(to_iceberg, lake | topic | storage), second)

    def wait_for(expected: list[tuple[Any, ...]], table_job: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        found: list[tuple[Any, ...]] = []
        while time.monotonic() < deadline:
            with contextlib.suppress(HeadgateError):
                table_job.checkpoint()  # the page has one each minute
            found = rows_of_the_table(catalog_uri)
            if len(found) >= len(expected):
                break
            time.sleep(0.2)
        assert found == sorted(expected)

    database.execute("INSERT INTO orders SELECT n, 1, 'new', n * 100 FROM generate_series(1, 5) n")
    expected: list[tuple[Any, ...]] = [("snapshot", n, 1, "new", n * 100) for n in range(1, 6)]
    with first["job"].start(), second["job"].start() as table_job:
        wait_for(expected, table_job)
        database.execute(
            "INSERT INTO orders VALUES (6, 1, 'new', 600)",
            "UPDATE orders SET version = 2, status = 'paid' WHERE id = 2",
            "DELETE FROM orders WHERE id = 3",
        )
        expected += [
            ("insert", 6, 1, "new", 600),
            ("update", 2, 2, "paid", 200),
            ("delete", 3, 1, "new", 300),
        ]
        wait_for(expected, table_job)
