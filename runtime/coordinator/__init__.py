"""The brain of a job."""
