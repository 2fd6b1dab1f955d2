"""How a job runs."""
