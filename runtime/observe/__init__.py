"""Metrics, spans and logs.

`catalogue.py` names every metric; `metrics.py` keeps and shows them, and `endpoint.py` serves them.
"""
