"""The state of jobs: key groups, slot tables, snapshots."""
