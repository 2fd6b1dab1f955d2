"""Places for coordinators and workers: this process, a process of its own, or Ray.

`launch.py` chooses among them. `host.py` runs a coordinator with its REST API and metrics. No other
room imports ray: `ray_driver.py` starts a job on Ray and follows it, `ray_actors.py` has the actors,
`leaders.py` finds out which of them leads, and `standby.py` lets two of them take turns.
"""
