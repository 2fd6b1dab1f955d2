"""Async I/O: calls of coroutine functions that run beside the subtask, with their inputs as state.

`retry.py` and `plan.py` face the user. `call.py` is one call, `queues.py` the order of results,
`in_flight.py` the operator with calls in flight, `map_async.py` and `micro_batches.py` the steps
made of it, `stored.py` their state.
"""
