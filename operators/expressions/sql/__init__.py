"""The SQL of expressions: parsed into a tree of known operations, then written for Polars.

Polars' own SQL parser accepts subqueries and table functions, and reads the files that they name
while it parses. So a user's text never reaches it. `parser.py` parses the text into a tree, which
can hold nothing but operations on the columns of one record, and `writer.py` writes the SQL for
Polars from that tree.
"""
