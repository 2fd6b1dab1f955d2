"""Patterns of records: `keyed.match(pattern)`, with the semantics of Flink's CEP.

`pattern.py` is the user's builder; `automaton.py` turns a pattern into an automaton; `matcher.py`
runs it over the records of one key on a `buffer.py` of the records taken; `operator.py` keeps all
that as keyed state.
"""
