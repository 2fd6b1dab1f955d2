"""A running job that is watched, as in tests/observe."""

from headgate.tests.observe.conftest import watch

__all__ = ["watch"]
