"""Results of Spark queries as bounded sources. Nothing in here imports pyspark but `child.py`."""
