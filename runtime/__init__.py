"""Runs jobs: plans, coordinators, workers, subtasks, and all ways to start a job and to talk to it.

`job.py` has the public face of a job, and the runnable job inside it, with the checks of a whole job
(`job_checks.py`), its settings (`job_settings.py`), and its physical plan (`plan.py`), which also has the
form in which a job travels to its coordinator. `handle.py`, `submission.py` and `finding.py` deal with
jobs that run. `shipping.py` sends user code to other processes, and `listening.py` opens ports.
"""
