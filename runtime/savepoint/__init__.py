"""Savepoints and checkpoints for users: written, found, described, compared, verified and deleted."""
