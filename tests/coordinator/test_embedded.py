"""The environment of an embedded Ray."""

from __future__ import annotations

import sys

import pytest

from headgate.errors import UsageError
from headgate.runtime.cluster.embedded import prepare_environment


def test_a_ray_that_was_imported_too_early_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read its settings already: what it starts would not let it in."""
    monkeypatch.setitem(sys.modules, "ray", sys)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(UsageError, match="set RAY_AUTH_TOKEN and RAY_AUTH_MODE=token before"):
        prepare_environment()
    monkeypatch.delitem(sys.modules, "ray")
    prepare_environment()
