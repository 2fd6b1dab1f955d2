"""Checkpoint barriers in one subtask: facts about its input channels in, decisions out.

* `handler.py` has the interface of all barrier handlers, their decisions, as values, and the simplest
  handler: a channel that has its barrier is blocked until all the others have theirs. Its guard keeps the
  snapshots of a subtask in order, and drops those that were aborted before.
* `alternating.py`: barriers overtake records, at once or after a while.
* `at_least_once.py`: nothing is blocked, so records may be processed again after a failure.
"""
