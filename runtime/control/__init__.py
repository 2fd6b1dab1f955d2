"""Control: messages between a coordinator and its workers, links, clients, and records of running jobs.

`messages.py` has the messages of a coordinator and its workers, and `link.py` has the links that
carry them, and the coordinator's port. `job_client.py` is a coordinator as its clients see it. `cluster.py`
is the part of a cluster that a coordinator needs.
"""
