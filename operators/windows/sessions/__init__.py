"""Sessions: windows that last as long as records of a key keep coming."""
