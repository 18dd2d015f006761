"""A training program whose first server is killed at worker 1's tenth step, and worker 1 at its twentieth. Their
replacements train to the end. The file in PID has the server's pid."""

import itertools
import os
import signal
import sys
from pathlib import Path

from dmltrain import fit
from dmltrain.backends.torch.trainer import TorchTrainer

pid, first = Path(os.environ["PID"]), "DMLTRAIN_JOIN" not in os.environ
if os.environ.get("DMLC_SERVER_ID") == "0" and first:
    pid.write_text(str(os.getpid()))
if os.environ.get("DMLC_WORKER_ID") == "1" and first:
    train_step, numbers = TorchTrainer.train_step, itertools.count(1)

    def kills(self, *values):
        victim = {10: lambda: int(pid.read_text()), 20: os.getpid}.get(next(numbers))
        if victim:
            os.kill(victim(), signal.SIGKILL)
        return train_step(self, *values)

    TorchTrainer.train_step = kills

sys.exit(fit.main(defaults={"dataset": "digits", "network": "mlp", "num_epochs": 6}))
