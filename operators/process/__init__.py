"""Process functions: the user's own operators over keyed records, with state, timers and side outputs.

`functions.py` is what users derive from, `context.py` what they are handed, `declared.py` what their
classes declare; `operator.py` and its siblings run them; `plan.py` makes steps of them.
"""
