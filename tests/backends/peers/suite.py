"""PyTorch's own tests of torch.distributed, which lie in its wheel, as one class.

They are imported as for gloo, because they name the backends that they are for, so that what a backend of another name
runs is what gloo runs; and as for four workers, because some are for four alone. That takes seconds, so it is done in
the process that forks all others.
"""

import os
import tempfile

os.environ.update(BACKEND="gloo", WORLD_SIZE="4", TEMP_DIR=tempfile.gettempdir(), INIT_METHOD="file://")
from torch.testing._internal.distributed import distributed_test  # noqa: E402


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def _barrier(self, *arguments, **options):
        """Torch's allows 10 s, which a busy machine may take."""
        super()._barrier(*arguments, **{"timeout": 120, **options})


def names() -> list[str]:
    return sorted(name for name in dir(Suite) if name.startswith("test_"))


def skipped(name: str) -> str:
    """Why it does not run here with any number of workers; "" if it does."""
    return getattr(getattr(Suite, name), "__unittest_skip_why__", "")
