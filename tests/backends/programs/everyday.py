"""A worker of a job: makes the everyday trainings of one kind of store, and prints what became of each.

everyday.py PLACE [repetitions of those that race, with random pauses], with a key of OPTIONS
"""

import json
import random
import sys
import warnings

import dmltrain
from dmltrain.backends.torch.distributed import layout
from tests.backends.everyday import (  # noqa: F401
    changed_gradients,
    dropped_steps,
    layouts,
    on_servers,
    unused_parameters,
    unusual,
    what_trains,
)
from tests.backends.everyday.run import CASES, judged

layout.BUCKET_BYTES = 100  # most parameters have a bucket of their own
warnings.filterwarnings("error", module=r"dmltrain\.")  # of what the script did not do
on, repetitions = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
rank, workers = dmltrain.rank(), dmltrain.num_workers()
for name, case in CASES.items():
    if case.on != on:
        continue
    if not repetitions:
        print(json.dumps({"case": name, "found": judged(name, rank, workers)}), flush=True)
    elif case.races:
        found = {judged(name, rank, workers, random.Random(f"{rank} {each}")) for each in range(repetitions)}
        print(json.dumps({"case": name, "found": " | ".join(sorted(found))}), flush=True)
