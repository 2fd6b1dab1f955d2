"""The SQL of expressions: read into a tree of known operations, then written out for Polars.

Polars' own reader of SQL takes subqueries and table functions, and it reads the files that they name while
it parses. So a user's text never reaches it. `parser.py` reads the text into a tree, which can hold nothing
but operations on the columns of one record, and `writer.py` writes the SQL for Polars from that tree.
"""
