"""Savepoints and checkpoints for users: written, found, shown, compared, checked, deleted."""
