"""Which sources of a job wait for each other."""

from __future__ import annotations

from ..plan import PhysicalPlan
from ..protocol.watermark_alignment import WatermarkAlignment


def alignment_of(plan: PhysicalPlan) -> WatermarkAlignment:
    """The alignment groups of all event-time steps; those of one group have equal settings."""
    settings = [node.watermarks for vertex in plan.vertices for node in vertex.nodes]
    aligned = [each.alignment for each in settings if each is not None and each.alignment]
    return WatermarkAlignment({each.group: (each.max_drift_ms, each.every_ms) for each in aligned})
