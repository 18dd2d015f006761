"""Some files need the fake CUDA device in their own process: test_fake_cuda.py runs them there."""

import importlib.util
import sys

collect_ignore = [] if "tests.device.plugin" in sys.modules else ["test_counts.py", "test_on_it.py"]
if importlib.util.find_spec("torch") is None:
    collect_ignore += ["test_fake_cuda.py"]
