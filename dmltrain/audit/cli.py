"""The program dmltrain-audit: says whether the workers of a job have used each sample once in each epoch.

Exit codes: 0 they have; 1 samples were lost or repeated, or the files contradict one another; 2 a mistake in the input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dmltrain.audit import count, count_draws, views_file
from dmltrain.base.errors import UserError
from dmltrain.base.safe_text import printed


@printed()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser("dmltrain-audit", description=(__doc__ or "").partition(": ")[2])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="files of --audit, DMLTRAIN_AUDIT or dmltrain.audited, of all hosts")
    folder = parser.parse_args(argv).folder
    try:
        found = _of_elastic_job(folder) if (folder / views_file.NAME).exists() else count_draws.count(folder)
    except UserError as error:
        sys.stderr.write(f"dmltrain-audit: error: {error}\n")
        return error.exit_code
    print("\n".join([*found.rows, *(f"problem: {problem}" for problem in found.problems)]))
    return 1 if found.problems else 0


def _of_elastic_job(folder: Path) -> count_draws.Counted:
    counted = count.count(folder)
    rows = [f"epoch {epoch}: {int((times > 0).sum())} of {len(times)} used" for epoch, times in counted.times.items()]
    return count_draws.Counted(tuple(rows), counted.problems)


if __name__ == "__main__":
    sys.exit(main())
