"""Functions of users: checks, their life cycle, and the handling of their errors."""
