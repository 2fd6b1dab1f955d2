"""The checkpoint store: local directory, S3, in memory."""
