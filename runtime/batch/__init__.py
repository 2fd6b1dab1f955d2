"""A bounded job as a PySpark job: each vertex is a stage, each of its subtasks a task (docs/batch.md).

Spark schedules, shuffles, sorts and tries again; the records are handled by the operators that also handle
them in a stream, subtask by subtask, in the order of event time.
"""
