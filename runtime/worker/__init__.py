"""A worker: a process that hosts subtasks and obeys one coordinator.

Reading path: `worker.py` handles the coordinator's messages, `deployment.py` has the subtasks of each
region, and `channels.py` connects them. `leader_link.py` decides which coordinator to obey.
`heartbeats.py` and `watch.py` go on while user code holds the event loop. Reports to the coordinator
are in `reports.py` and `subtask_metrics.py`.
"""
