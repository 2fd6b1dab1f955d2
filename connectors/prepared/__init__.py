"""Results that are made once, as Parquet in the storage of the job, and then read as files."""
