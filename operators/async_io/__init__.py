"""Async I/O: calls of coroutine functions that go on while the subtask does, with their inputs as state.

`retry.py` and `plan.py` are what users meet. `call.py` is one call, `queues.py` the order of results,
`in_flight.py` the operator that has calls under way, `map_async.py` and `micro_batches.py` the steps made
of it, `stored.py` their state.
"""
