"""Write how PyTorch's own tests end with gloo on this machine: python -m tests.backends.peers.reference > gloo.json

The tests that pass are listed by the numbers of workers with which they do, the others by what they say. Those that
two and three workers are too few for are tried with four, and with eight.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.backends.peers.run import outcomes

FEW, MORE = (2, 3), (4, 8)


def ends(test: str) -> tuple[str, str]:
    """ "passed" and the numbers of workers; or "skipped" or "failed", and why."""
    said = dict.fromkeys(FEW, "")
    for workers in (*FEW, *MORE):
        if workers in FEW or "passed" not in said.values() and ("size" in said[3] or "failed" in said[3]):
            with tempfile.TemporaryDirectory() as folder:
                said[workers] = outcomes("gloo", workers, [test], Path(folder))[test]
            print(test, workers, said[workers], file=sys.stderr, flush=True)
    passed = [str(workers) for workers, end in said.items() if end == "passed"]
    kind, _, reason = max(said.items())[1].partition(": ")
    return ("passed", " ".join(passed)) if passed else (kind, reason)


def table(tests: list[str]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for test in tests:
        kind, more = ends(test)
        found.setdefault(kind, {}).setdefault(more, []).append(test)
    return found


if __name__ == "__main__":
    from tests.backends.peers.suite import names

    print(json.dumps(table(names()), indent=1, sort_keys=True))
