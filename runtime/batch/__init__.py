"""A bounded job as a PySpark job: each vertex is a stage, each of its subtasks a task (docs/batch.md).

Spark schedules, shuffles, sorts and retries; the records are processed by the same operators as in
a stream, subtask by subtask, in event-time order.
"""
