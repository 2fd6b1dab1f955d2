"""Preparations before a worker gets its first subtasks: imports take longer than all the rest."""

from __future__ import annotations

import importlib

from ..control.messages import Warm
from ..options.registry import Options
from ..options.state import STATE_BACKEND
from ..shipping import unship

_BACKENDS = {"rocksdb": "...state.keyed.rocksdb"}


def import_all(message: Warm) -> None:
    """Import what the job's functions need, by making them once, and its state backend. Blocking."""
    unship(message.job)
    backend = _BACKENDS.get(Options(message.settings).get(STATE_BACKEND))
    if backend is not None:
        importlib.import_module(backend, __package__)
