"""A training program whose first server is killed at worker 1's tenth step. The file in PID has its pid."""

import itertools
import os
import signal
import sys
from pathlib import Path

from dmltrain import fit
from dmltrain.backends.torch.trainer import TorchTrainer

pid = Path(os.environ["PID"])
if os.environ.get("DMLC_SERVER_ID") == "0" and "DMLTRAIN_JOIN" not in os.environ:
    pid.write_text(str(os.getpid()))
if os.environ.get("DMLC_WORKER_ID") == "1":
    train_step, numbers = TorchTrainer.train_step, itertools.count(1)

    def kills(self, *values):
        if next(numbers) == 10:
            os.kill(int(pid.read_text()), signal.SIGKILL)
        return train_step(self, *values)

    TorchTrainer.train_step = kills

sys.exit(fit.main(defaults={"dataset": "digits", "network": "mlp", "num_epochs": 6}))
