"""Decides which of two processes, each able to run a job's coordinator, should lead. Pure.

These decisions are only hints: the job log decides who leads. If both believe that it is their
turn, one leads and the other is fenced, so a wrong guess costs a takeover and nothing else. No
guess may leave both waiting for the other, though: *the first*, which the job began with, does not
wait for a process that only stands by.
"""

from __future__ import annotations

import enum


class Turn(enum.Enum):
    """The roles of the two processes."""

    LEADS = "leads"
    STANDS_BY = "stands by"
    OVER = "over"
    """The job has ended under it, or could not begin."""
    GONE = "gone"
    """It died, and Ray has not recreated it; or it was fenced and gave up."""
    SILENT = "silent"
    """It does not answer."""


class Step(enum.Enum):
    """The next step of a process."""

    LEAD = "lead"
    WATCH = "watch"
    """Keep a connection to the leader, and lead when it breaks."""
    ASK = "ask again, in a moment"
    LEAVE = "leave"


class Watched(enum.Enum):
    """The ways in which the connection to a leader ends."""

    JOB_ENDED = "the job has ended"
    DEPOSED = "it leads no more, and lives"
    LOST = "it hung up, or did not answer in time"


def first_step(*, first: bool, restarted: bool) -> Step:
    """Decide for a process that starts; `restarted`: it replaces one that died."""
    return Step.LEAD if first and not restarted else Step.ASK


def step_by_turn(other: Turn, *, first: bool, silent_ms: int, silent_max_ms: int) -> Step:
    """Decide for a process that does not lead and has asked the other one.

    Args:
        other: the state of the other one.
        first: whether this is the one that the job began with.
        silent_ms: for how long the other has not answered.
        silent_max_ms: one that is silent for longer counts as dead.
    """
    match other:
        case Turn.LEADS:
            return Step.WATCH
        case Turn.OVER:
            return Step.LEAVE
        case Turn.GONE:
            return Step.LEAD
        case Turn.STANDS_BY:
            return Step.LEAD if first else Step.ASK
        case Turn.SILENT:
            return Step.LEAD if silent_ms >= silent_max_ms else Step.ASK


def step_behind(watched: Watched) -> Step:
    """Decide for a process that has watched a leader until its end."""
    match watched:
        case Watched.JOB_ENDED:
            return Step.LEAVE
        case Watched.DEPOSED:
            return Step.ASK
        case Watched.LOST:
            return Step.LEAD


def step_fenced(other: Turn) -> Step:
    """Decide for a leader that was fenced, by the other process or by another run."""
    match other:
        case Turn.LEADS:
            return Step.WATCH
        case Turn.SILENT:
            return Step.ASK
        case _:
            return Step.LEAVE
