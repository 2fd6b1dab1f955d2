"""One module per family of steps: the stream methods that add them, and the checks of their arguments."""
