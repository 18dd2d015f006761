"""`ray start`, which on a busy machine waits for its node as long as it takes: Ray itself gives up after 30 s, in which
it asks without a pause."""

import sys
import time

import ray._private.services as services
from ray.scripts.scripts import main

NODE_SECONDS, PAUSE_SECONDS = 180.0, 0.2
get_node = services.get_node


def patient(*arguments: object) -> object:
    until = time.monotonic() + NODE_SECONDS
    while True:
        try:
            return get_node(*arguments)
        except RuntimeError:
            if time.monotonic() > until:
                raise
            time.sleep(PAUSE_SECONDS)


services.get_node = patient
sys.argv.insert(1, "start")
main()
