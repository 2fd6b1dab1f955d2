"""The progress of event time: watermark generators, and the merging of watermarks of several splits."""
