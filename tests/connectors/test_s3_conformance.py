"""The file connectors keep all promises of the conformance kit on S3, on a server that may be killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headgate.testing.connectors import Check
from headgate.testing.servers.programs import NotAvailableError
from headgate.testing.servers.versitygw import ACCESS, BUILD_S_MAX, SECRET, S3Gateway, running
from headgate.tests.support.conformance import SECONDS_MAX, keep, promises
from headgate.tests.support.s3_cases import S3
from headgate.tests.support.skips import skip_or_fail

SLOW = ("once_after_any_two_crashes", "a_process_may_be_killed")
pytestmark = [pytest.mark.server, pytest.mark.timeout(BUILD_S_MAX + SECONDS_MAX + 60)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Gateway]:
    """A running server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for key in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(key, raising=False)
        try:
            with running(tmp_path_factory.mktemp("s3") / "objects") as gateway:
                yield gateway
        except NotAvailableError as error:
            skip_or_fail(str(error))


@pytest.mark.parametrize(("kind", "check"), promises(S3))
def test_it_keeps_the_promise(server: S3Gateway, kind: type[Any], check: Check[Any]) -> None:
    keep(check, kind(server), SLOW)
