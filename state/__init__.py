"""What a job remembers: key groups, slot tables, snapshots."""
