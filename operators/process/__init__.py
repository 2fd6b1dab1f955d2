"""Process functions: the user's own operators over keyed records, with state, timers and side outputs.

`functions.py` has the base classes, `context.py` their contexts, `declared.py` the declarations in
their classes; `operator.py` and its siblings run them; `plan.py` makes steps of them.
"""
