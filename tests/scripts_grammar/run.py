"""Runs random programs of the grammar, and says which were right, refused or wrong.

python -m tests.scripts_grammar.run --seeds 0 10000      # workers are threads of this process
python -m tests.scripts_grammar.run --seeds 17 18 --all  # with the listing of each program
python -m tests.scripts_grammar.run --listing FILE       # a program that was printed
python -m tests.scripts_grammar.run --elastic            # in an elastic job that loses nobody
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from tests.connected import connected
from tests.scripts_grammar.drawing import Piece, Program
from tests.scripts_grammar.idioms import EXTRAS, STYLES
from tests.scripts_grammar.judging import DistributeOn, Verdict, judge, smallest, valid

SHOWN = 3  # programs of each kind of failure
NOT_OF_DDP = {each.name for each in (*EXTRAS, *STYLES) if not each.ddp}


class Summary:
    """What came of the programs of these seeds, but of those with an idiom of `without`."""

    def __init__(
        self,
        seeds: Iterable[int],
        distribute_on: DistributeOn = connected,
        without: Iterable[str] = (),
        elastic: bool = False,
    ) -> None:
        self._distribute, self._elastic = distribute_on, elastic
        self.ends: list[tuple[int, Program, Verdict]] = []
        for seed in seeds:
            tried, expected = valid(seed, elastic)
            if not tried.idioms & set(without):
                self.ends.append((seed, tried, judge(tried, distribute_on, expected, elastic)))

    @property
    def failures(self) -> list[tuple[int, Program, Verdict]]:
        return [end for end in self.ends if end[2].fails]

    @property
    def refused(self) -> float:
        """Of the programs that DistributedDataParallel trains rightly, this part was refused."""
        kinds = [verdict.kind for _, tried, verdict in self.ends if not tried.idioms & NOT_OF_DDP]
        return kinds.count("refused") / max(len(kinds), 1)

    def text(self) -> str:
        counts = Counter(verdict.kind for _, _, verdict in self.ends)
        found = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        lines = [f"{len(self.ends)} programs: {found}; refused of those that DDP trains: {100 * self.refused:.1f} %"]
        used = Counter(idiom for _, tried, _ in self.ends for idiom in tried.idioms)
        causes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for _, tried, verdict in self.ends:
            causes[verdict.cause].update(["", *tried.idioms])
        for cause, idioms in sorted(causes.items(), key=lambda each: -each[1][""]):
            often = sorted(set(idioms) - {""}, key=lambda each: -(idioms[each] ** 2) / (used[each] + 3))[:4]
            which = ", ".join(f"{each} {idioms[each]} of {used[each]}" for each in often)
            lines += [f"{idioms['']:6} {cause}", *([f"       with {which}"] if cause != "right" else [])]
        return "\n".join(lines)

    def listings(self) -> Iterator[str]:
        """The smallest programs of the failures, some of each kind."""
        shown: Counter[str] = Counter()
        for seed, tried, verdict in self.failures:
            shown[verdict.cause] += 1
            if shown[verdict.cause] <= SHOWN:
                small = smallest(tried, self._distribute, verdict.cause, self._elastic)
                text = judge(small, self._distribute, elastic=self._elastic).text
                yield f"# seed {seed}: {verdict.kind}: {text}\n{small.listing()}"


def listed(path: Path) -> Program:
    """The program of a listing."""
    text = path.read_text()
    return Program(3 if "# 3 workers" in text else 2, (Piece((), text),))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 1000))
    parser.add_argument("--without", nargs="*", default=[], help="idioms")
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--listing", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.listing:
        print(judge(listed(given.listing), connected, elastic=given.elastic))
        return
    summary = Summary(range(*given.seeds), without=given.without, elastic=given.elastic)
    print(summary.text(), flush=True)
    for seed, tried, verdict in summary.ends if given.all else []:
        print(f"\n# seed {seed}: {verdict}\n{tried.listing()}")
    for listing in summary.listings():
        print(f"\n{listing}", flush=True)


if __name__ == "__main__":
    main()
