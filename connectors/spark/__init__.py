"""Results of Spark queries as bounded sources. Only `child.py` imports pyspark."""
