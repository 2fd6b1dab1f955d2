"""A worker: a process that hosts subtasks and obeys one coordinator.

Reading path: `worker.py` handles the coordinator's messages, `deployment.py` has the subtasks of each
region, `reports.py` tells the coordinator about them, and `channels.py` connects them. `heartbeats.py`
and `watch.py` go on while user code holds the event loop. Metrics are in `subtask_metrics.py`.
"""
