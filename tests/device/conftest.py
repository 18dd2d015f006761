"""test_on_it.py needs the fake CUDA device in its own process: test_fake_cuda.py runs it there."""

import importlib.util
import sys

collect_ignore = [] if "tests.device.plugin" in sys.modules else ["test_on_it.py"]
if importlib.util.find_spec("torch") is None:
    collect_ignore += ["test_fake_cuda.py"]
