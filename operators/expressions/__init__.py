"""Expressions on columns: parsed and checked at plan time, evaluated for whole batches."""
