"""Sessions: windows that last as long as records of a key keep coming (features.md TIM-06, 3.15)."""
