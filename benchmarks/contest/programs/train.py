"""One process of a training contest (ddp.py): contest/trainee.py says what a worker does."""

import os

import dmltrain.kvstore

if os.environ.get("DMLC_ROLE") != "worker":
    dmltrain.kvstore.create("dist_sync")  # serves the job and ends; torch is not imported

from contest import trainee  # noqa: E402

if __name__ == "__main__":
    trainee.main()
