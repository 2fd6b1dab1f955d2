"""State without a job: snapshots are read as tables of Arrow, and written as new savepoints."""
