"""Try many logs; see the package."""

import argparse
import sys
import time
from collections import Counter

from tests.report.truth import MAKERS, case, judge, read


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.report.truth", description=__doc__)
    parser.add_argument("--dialect", choices=MAKERS, help="default: all")
    parser.add_argument("--first", type=int, default=0, help="number of the first log")
    parser.add_argument("--count", type=int, default=200, help="logs of each dialect")
    parser.add_argument("--show", action="store_true", help="print each log and what was read")
    parser.add_argument("--most", type=int, default=5, help="faults that are printed of each dialect")
    options = parser.parse_args()
    failed = False
    for dialect in [options.dialect] if options.dialect else MAKERS:
        began, counts = time.process_time(), Counter[str]()
        for number in range(options.first, options.first + options.count):
            said = judge(dialect, number)
            counts[said if said in ("exact", "noted") else "wrong"] += 1
            if said not in ("exact", "noted") and counts["wrong"] <= options.most:
                print(f"{dialect} {number}: {said}"[:1500])
            if options.show:
                made = case(dialect, number)
                print(made.description, *(data.decode(errors="replace") for data in made.files.values()), sep="\n")
                print(said, *read(made), sep="\n")
        share, took = counts["noted"] / options.count, time.process_time() - began
        print(f"{dialect}: {dict(counts)}, {share:.2%} noted, {took:.1f} s")
        failed |= counts["wrong"] > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
