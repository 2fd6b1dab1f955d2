"""Makes the operators of windows over event time, also those in front of an exchange."""

from __future__ import annotations

from dataclasses import dataclass

from ..aggregation.aggregates import AggregatePlan
from ..aggregation.partials import adds_partials, partial_plan
from .dense_partials import DensePartials
from .kinds import TimeWindow, TumblingWindow
from .panes.operator import PaneAggregate
from .pre_aggregate import PreAggregate
from .tumbling import TumblingAggregate


@dataclass(frozen=True, slots=True)
class WindowFactory:
    """Makes the operator of a step with windows over event time."""

    window: TimeWindow
    plan: AggregatePlan
    step: str
    committed: bool = False

    def __call__(self) -> TumblingAggregate | PaneAggregate:
        if isinstance(self.window, TumblingWindow) and self.window.plain:
            return TumblingAggregate(self.window, self.plan, self.step, committed=self.committed)
        return PaneAggregate(self.window, self.plan, self.step, committed=self.committed)

    @property
    def takes_partials(self) -> bool:
        """True if records may be aggregated on their way here, because no result can tell."""
        return not self.window.early and adds_partials(self.plan)

    @property
    def takes_dense_partials(self) -> bool:
        """True if they may also be aggregated there without looking up their keys."""
        return self.takes_partials and DensePartials.fits(partial_plan(self.plan))

    def pre_aggregate(self) -> PreAggregate:
        """Return an operator that sends partial results to that of this step."""
        return PreAggregate(self.window, self.plan)
