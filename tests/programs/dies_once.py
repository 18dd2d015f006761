"""A training program whose worker 1 is killed at its tenth step. Its replacement trains to the end."""

import itertools
import os
import signal
import sys

from dmltrain import fit

if os.environ.get("DMLC_WORKER_ID") == "1" and "DMLTRAIN_JOIN" not in os.environ:
    from dmltrain.backends.torch.trainer import TorchTrainer

    train_step, numbers = TorchTrainer.train_step, itertools.count(1)

    def dies(self, *values):
        if next(numbers) == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(self, *values)

    TorchTrainer.train_step = dies

sys.exit(fit.main(defaults={"dataset": "digits", "network": "mlp", "num_epochs": 6}))
