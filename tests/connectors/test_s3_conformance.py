"""The file connectors keep all promises of the conformance kit on S3, on a server that may be killed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from headgate.testing.connectors import Check, SourceCase, sink_checks, source_checks
from headgate.testing.servers.programs import NotAvailableError
from headgate.testing.servers.versitygw import ACCESS, BUILD_S_MAX, SECRET, S3Gateway, running
from headgate.tests.support.s3_cases import S3
from headgate.tests.support.skips import skip_or_fail

SLOW = ("once_after_any_two_crashes", "a_process_may_be_killed")
THOROUGH = bool(os.environ.get("HEADGATE_THOROUGH"))
SECONDS_MAX = 600 if THOROUGH else 240
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


def applying() -> list[Any]:
    return [
        pytest.param(kind, check, id=f"{name}-{check.name}")
        for name, kind in S3.items()
        for check in (source_checks() if issubclass(kind, SourceCase) else sink_checks())
        if check.applies_to(kind)
    ]


@pytest.mark.parametrize(("kind", "check"), applying())
def test_it_keeps_the_promise(server: S3Gateway, kind: type[Any], check: Check[Any]) -> None:
    if check.name in SLOW and not THOROUGH:
        pytest.skip("it takes minutes: make test-all, or HEADGATE_THOROUGH=1")

    async def guarded() -> None:
        async with asyncio.timeout(SECONDS_MAX):
            await check.run(kind(server))

    asyncio.run(guarded())
