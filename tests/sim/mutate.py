"""`python -m headgate.tests.sim.mutate` plants the bugs in `mutants/`, and looks whether each is found."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .mutant import PACKAGE, SEEDS_MAX, Hunt, Mutant, PatchError, all_mutants, hunt

COMMAND = "python -m headgate.tests.sim.mutate"
TEXT_MAX = 110


def main(arguments: list[str]) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("name", nargs="*", help="of mutants; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument(
        "--seeds", type=int, default=SEEDS_MAX, help="give up after this number of seeds"
    )
    parser.add_argument("--write", type=Path, help="a page to write the table to")
    chosen = parser.parse_args(arguments)
    wanted = [each for each in all_mutants() if not chosen.name or each.name in chosen.name]

    def run(mutant: Mutant) -> Hunt | str:
        try:
            mutant.patched(PACKAGE)
            with tempfile.TemporaryDirectory(prefix="headgate-mutant-") as folder:
                found = hunt(mutant, Path(folder), first=chosen.first, seeds_max=chosen.seeds)
        except PatchError as error:
            print(f"{mutant.name}: does not apply", flush=True)
            return str(error)
        print(f"{mutant.name}: {found.seeds} seeds: {found.found or 'NOT FOUND'}", flush=True)
        return found

    with ThreadPoolExecutor(chosen.jobs) as pool:
        results = list(pool.map(run, wanted))
    hunts = [each for each in results if isinstance(each, Hunt)]
    stale = [each for each in results if isinstance(each, str)]
    missed = [each.mutant.name for each in hunts if not each.found]
    mean = sum(each.seeds for each in hunts) / max(1, len(hunts))
    found = len(hunts) - len(missed)
    summary = f"{found} of {len(results)} mutants found, after {mean:.0f} seeds at the mean"
    print(summary)
    for text in stale:
        print(text)
    if missed:
        print(f"not found within {chosen.seeds} seeds: {', '.join(missed)}")
    if chosen.write is not None:
        chosen.write.write_text(page(hunts, summary))
    return 1 if stale or missed else 0


def page(hunts: list[Hunt], summary: str) -> str:
    """The table, with its command."""
    rows = [
        f"| {each.mutant.name} | {each.mutant.about} | {each.mutant.breaks} "
        f"| {each.seeds if each.found else 'not found'} | {_short(each.found)} |"
        for each in hunts
    ]
    return "\n".join(
        [
            "# Planted bugs",
            "",
            "What the [simulation](simulation.md) is worth: bugs of the protocol, planted one at a time "
            "(`tests/sim/mutants`),",
            "and how many seeds it takes until one fails. Made by `make sim-mutants` with `--write`.",
            "",
            f"{summary}.",
            "",
            "| mutant | what is wrong | promise | seeds | what the last seed said |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _short(text: str) -> str:
    text = text.replace("|", "/").replace("`", "")
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]} …"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
