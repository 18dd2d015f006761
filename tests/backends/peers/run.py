"""Run PyTorch's own tests with a backend: python -m tests.backends.peers.run WAY WORKERS TEST ...

Prints how each of them ends. WAY: see program.py. Each test has a job of its own, whose processes are forked.
"""

import sys
import tempfile
import time
from pathlib import Path

from tests.forked_job import ForkedJob, forker
from tests.waiting import wait_for

PROGRAM = Path(__file__).with_name("program.py")


def outcomes(way: str, workers: int, tests: list[str], folder: Path, seconds: float = 120.0) -> dict[str, str]:
    """How each test ends in one job that runs them all: "passed", "skipped: REASON", or "failed" with all output.

    `folder`: a new one. `seconds`: for one test.
    """
    job = ForkedJob(folder=folder / "job", forker=forker("torch", "tests.backends.peers.suite"))
    try:
        job.begin([PROGRAM, way, folder, *tests], workers=workers, servers=0 if way == "gloo" else 1)
        wait_for_end([job.processes[f"worker-{rank}"] for rank in range(workers)], seconds * len(tests))
    finally:
        job.kill()
    said = [{test: end for row in job.results(rank) for test, end in row.items()} for rank in range(workers)]
    ends = {test: {each.get(test, "failed") for each in said} for test in tests}
    return {
        test: f"failed\n{job.outputs()}" if "failed" in end or len(end) > 1 else end.pop() for test, end in ends.items()
    }


def wait_for_end(processes: list, seconds: float) -> None:
    """The others of one that has failed may wait for it for ever."""
    end = time.monotonic() + seconds

    def over() -> bool:
        codes = [process.poll() for process in processes]
        return None not in codes or any(codes) or time.monotonic() > end

    wait_for(over, "the end of the tests", 2 * seconds)


if __name__ == "__main__":
    way, workers, *tests = sys.argv[1:]
    for test in tests:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{test}: {outcomes(way, int(workers), [test], Path(folder))[test]}", flush=True)
