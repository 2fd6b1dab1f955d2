"""The largest frame between workers is an option of the job."""

from __future__ import annotations

import pytest

from headgate.errors import OptionError
from headgate.operators.elements import ObjectBatch
from headgate.runtime.exchange.hub import ExchangeHub
from headgate.runtime.exchange.wire import ElementEncoder
from headgate.runtime.listening import ListenerLimits
from headgate.runtime.options.registry import Options

KEY = "headgate.listener.frame-size-max"


def test_the_option_reaches_both_ends_of_a_connection() -> None:
    limits = ListenerLimits.of(Options({KEY: "2 gb"}))
    hub = ExchangeHub("w", "token", limits=limits)
    assert hub._settings.frame_size_max_bytes == limits.frame_size_max_bytes == 2 << 30
    assert ExchangeHub("w", "token")._settings.frame_size_max_bytes == 1 << 30


@pytest.mark.parametrize("size", ["4 gb", "10 b"])
def test_sizes_that_no_frame_can_have_are_refused(size: str) -> None:
    with pytest.raises(OptionError, match="must be at"):
        Options({KEY: size})


def test_the_error_of_a_record_that_is_too_large_names_the_option() -> None:
    encoder = ElementEncoder(0, "map", 1_000)
    with pytest.raises(Exception, match="limit=`1000`") as refused:
        encoder.batch(ObjectBatch(["x" * 2_000], None), 0)
    assert KEY in str(refused.value)
