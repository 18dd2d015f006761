"""dmltrain-launch, forked by tests/forked_job.py. Its standard output is the descriptor that it inherits; its log has
standard error alone."""

import os
import tempfile

from dmltrain_launch.cli import main
from tests.forked_job import INHERITED

output = int(os.environ.pop(INHERITED[0]))
os.dup2(output, 1)
os.close(output)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
tempfile.tempdir = None  # that of its own environment
main()
