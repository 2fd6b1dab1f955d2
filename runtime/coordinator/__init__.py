"""The coordinator of a job: one object that deploys it, takes its checkpoints and restarts it.

`job.py` has the coordinator itself: it claims a generation in the job log, then runs one state after the
other. What the states share is in `context.py`, whose parts are the environment (`environment.py`), the
present attempt (`attempt.py`), and the modules below.

* States: `context.py` has the transitions; `adopting.py`, `deploying.py`, `running.py` with `regional.py`,
  `restarting.py` and `ending.py` have the states. Everything that happens is an event (`environment.py`).
* Who leads: `former.py` (another run of the job), `leadership.py` (another coordinator of this run).
* Workers: `workers.py` starts and watches them, and they connect to the port in `control/link.py`;
  `placement.py` says what runs where.
* State of the job: `checkpointing.py` takes checkpoints, `restore.py` finds and assigns what an attempt
  restores, `sources.py` cuts sources into splits, `output.py` handles the output of earlier runs.
* Failures: `failures.py` and `watchdog.py`.
* Clients: `clients.py` and `commands.py`; `status.py` and `views.py` are what they see, and
  `reporting.py` has metrics, restores and restarts.

No module here imports one that imports it, also not for types or within functions.
"""
