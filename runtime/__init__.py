"""Runs jobs: plans, coordinators, workers, subtasks, and all ways to start a job and to talk to it.

`job.py` is the public face of a job. Inside it is `runnable_job.py`, with the checks of a whole job
(`job_checks.py`) and its physical plan (`plan.py`); `job_spec.py` is the form in which a job travels to
its coordinator. `handle.py`, `submission.py` and `finding.py` deal with jobs that run. `shipping.py`
sends user code to other processes, and `listening.py` opens ports.
"""
