"""Windows of records: any assigner, trigger and evictor, on keyed state (features.md TIM-06 to TIM-09)."""
