"""The events of a long run, for people: faults by kind, and what the job did about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from .nemesis import ACTS, LASTING


@dataclass(slots=True)
class Summary:
    """Sums over many seeds."""

    first: int
    seeds: int = 0
    failed: int = 0
    virtual_s: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, violations: list[str], virtual_s: float, seen: Mapping[str, int]) -> None:
        """One more seed."""
        self.seeds += 1
        self.failed += bool(violations)
        self.virtual_s += virtual_s
        self.seen.update(seen)

    def rows(self) -> list[tuple[str, str]]:
        """Return the number of events by kind."""
        seen = self.seen
        faults = {act.__name__: seen[act.__name__] for act in ACTS}
        return [
            ("seeds", f"{self.seeds:,} from {self.first} on"),
            ("violations", f"{self.failed:,}"),
            ("virtual hours", f"{self.virtual_s / 3600:.1f}"),
            ("jobs", _listed({k[4:]: n for k, n in seen.items() if k.startswith("job: ")})),
            ("records made visible", f"{seen['records']:,}"),
            ("checkpoints completed", f"{seen['checkpoint']:,}"),
            (
                "of them with records on their way",
                f"{seen['checkpoint with records on their way']:,}",
            ),
            ("savepoints", f"{seen['savepoint done']:,}"),
            ("restores", f"{seen['restored']:,}"),
            ("takeovers", f"{seen['takeover']:,}"),
            ("rescales", f"{seen['rescaled']:,}"),
            ("trouble, acts", _listed(faults)),
            (
                "trouble that lies in wait, seeds",
                _listed({kind: seen[f"plan {kind}"] for kind in LASTING}),
            ),
        ]

    def text(self) -> str:
        """For a terminal."""
        return "\n".join(f"{name}: {value}" for name, value in self.rows())

    def markdown(self, command: str) -> str:
        """For the docs."""
        lines = [f"`{command}`", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in self.rows()]
        return "\n".join(lines) + "\n"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {counts[name]:,}" for name in sorted(counts))
