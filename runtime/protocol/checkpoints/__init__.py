"""The checkpoints of a job, as its coordinator sees them.

* `coordinator.py` is the state machine: triggers, acknowledgements and the time come in; decisions go out,
  as values: trigger, publish, notify, discard.
* `settings.py` says when checkpoints are taken and how; the schedule of periodic ones is with it.
* `manifest.py` lists the state files of a completed checkpoint, as the job log stores them.
* `packs.py` puts the in-flight records of all channels of a subtask behind one handle, and finds them.
* `statistics.py` keeps how long each phase of a checkpoint took, and explains it in a sentence.

`coordinator/checkpointing.py` carries the decisions out. What a subtask does with the barriers is in
`barriers/`.
"""
