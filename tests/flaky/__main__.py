"""Test files under bad conditions: a busy machine, processes that stand still for a second, sends that come late.

    python -m tests.flaky tests/test_blocks.py --times 5       (or: make flaky FILES=tests/test_blocks.py TIMES=5)
    python -m tests.flaky --changed --seconds 300

A test that passes here waits for conditions; one that expects something within a time, or in an order that nothing
guarantees, fails sooner or later. Freezing needs root and a control group; without them it says so, and does the rest.
Ctrl-C leaves nothing behind, and what a killed run left, the next one removes.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from tests import control_groups, leftovers
from tests.flaky.changed import changed_tests
from tests.flaky.conditions import Conditions
from tests.flaky.run import ignore_interrupts, run

MARKS = "not alone and not thorough and not exhaustive"  # what is `alone` measures, which makes no sense here


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.flaky", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="test files, or nodes such as FILE::test_name")
    parser.add_argument("--changed", action="store_true", help="the test files that have changed (the default)")
    parser.add_argument("--times", type=int, default=5, help="how often each file runs (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="no test starts after so long (default: no limit)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of all chances")
    parser.add_argument("-x", "--exitfirst", action="store_true", help="no run starts after one that failed")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--busy", type=int, default=cores, help="busy loops (default: as many as cores)")
    parser.add_argument("-m", dest="marks", default=MARKS, metavar="MARKS", help="as for pytest (default: %(default)s)")
    return parser.parse_args(argv)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str]) -> int:
    given = parse(argv)
    files = given.files or changed_tests()
    if not files:
        print("No test file has changed.")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # the latter is ignored in the background of a script
        signal.signal(number, interrupted)
    leftovers.remove()
    try:
        with ExitStack() as stack:
            return repeated(files, given, stack)
    except KeyboardInterrupt:
        print("Interrupted.")
        return 130


def repeated(files: list[str], given: argparse.Namespace, stack: ExitStack) -> int:
    chance = random.Random(given.seed)
    folder = leftovers.BUILD / f"flaky-{os.getpid()}"  # seen by the hosts of test beds, other than /tmp
    conditions = Conditions(folder, chance, given.busy, control_groups.freezer(os.geteuid()))
    stack.callback(conditions.close)
    stack.callback(ignore_interrupts)  # before that
    conditions.start()
    for each in conditions.missing:
        print(f"Missing: {each}")
    runs = [file for _ in range(given.times) for file in chance.sample(files, len(files))]
    end = time.monotonic() + (given.seconds or float("inf"))
    failed = made = 0
    while made < len(runs) and time.monotonic() < end and not (failed and given.exitfirst):
        made += 1
        failed += run(runs[made - 1], given.marks, conditions, f"seed {given.seed}, run {made}", end)
    late = f", the last one perhaps in part, as {given.seconds:g} s are over" if time.monotonic() > end else ""
    print(f"{made} of {len(runs)} runs made{late}; {failed} failed (seed {given.seed})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
