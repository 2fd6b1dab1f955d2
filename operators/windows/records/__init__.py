"""Record-at-a-time windows: any assigner, trigger and evictor, on keyed state."""
