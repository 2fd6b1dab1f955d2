"""The source of MySQL and MariaDB keeps all promises of the conformance kit."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.testing.connectors import Check
from headgate.testing.servers.mariadb import MariaDbServer
from headgate.tests.support.conformance import TIMEOUT, keep, promises
from headgate.tests.support.mysql_cases import MYSQL

pytestmark = TIMEOUT


@pytest.mark.parametrize(("kind", "check"), promises(MYSQL))
def test_it_keeps_the_promise(database: MariaDbServer, kind: type[Any], check: Check[Any]) -> None:
    keep(check, kind(database))
