"""Tests of jobs: `from headgate.testing import harness`."""

from .harness import Harness, harness

__all__ = ["Harness", "harness"]
