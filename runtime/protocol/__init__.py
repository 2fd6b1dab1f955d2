"""The decisions of the runtime, without I/O, clocks, randomness or concurrency.

Each module is a state machine or a function: events and the time come in, decisions go out as
values, and the caller carries them out. So each can be tested with every order of events.

* `checkpoints/`: when checkpoints start, complete and fail; `barriers/`: when a subtask takes its
  snapshot.
* `joblog`, `job_result`, `old_output`, `adoption`: the job log, and what another coordinator
  concludes from it; `names`: the names of all objects in storage.
* `failures`, `failure_history`, `failover`, `restart`, `liveness`, `standby`: what
  failed, what restarts for it and when.
* `backpressure`, `debloating`, `drops`, `watermark_alignment`, `loop_rounds`, `redistribution`,
  `worker_nodes`: one decision each.
"""
