"""Training like examples/train_digits.py, each worker in a folder of its own: FOLDER/0, FOLDER/1 ... Arguments: FOLDER,
then the options."""

import os
import sys
from pathlib import Path

from dmltrain import fit

folder = Path(sys.argv[1], os.environ["DMLC_TASK_ID"]) if os.environ["DMLC_ROLE"] == "worker" else Path(sys.argv[1])
folder.mkdir(exist_ok=True)
os.chdir(folder)
defaults = {"dataset": "digits", "network": "mlp", "batch_size": 32, "num_examples": 300}
sys.exit(fit.main(sys.argv[2:], prog="own_folder", defaults=defaults))
