"""Patterns of records: `keyed.match(pattern)`, with the semantics of Flink's CEP.

`pattern.py` is what users write, `compiler.py` makes an automaton of it, `matcher.py` runs it over the
records of one key on a `buffer.py` of what was taken, `operator.py` keeps all that as keyed state.
"""
