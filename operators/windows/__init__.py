"""Windows: their kinds, and the operators that aggregate or collect the records in them."""
