"""Grafana dashboards and Prometheus alert rules, made by code; `python -m headgate.k8s.monitoring`."""
