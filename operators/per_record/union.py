"""union: several streams as one.

The operator does nothing, as the inputs of a node are read together.
"""

from __future__ import annotations

from ..base import Operator
from ..elements import Batch


class UnionOperator(Operator):
    """Passes every batch on, whichever input it came from."""

    def process(self, batch: Batch, input_index: int) -> None:
        self.output.emit(batch)
