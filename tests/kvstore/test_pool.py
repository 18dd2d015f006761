"""The thread pool: threads that last as long as their process."""

import subprocess
import sys

from tests.waiting import SECONDS

PROGRAM = """
import atexit, threading
from dmltrain.kvstore.server.pool import Pool

pool, done = Pool(2, "arithmetic"), threading.Event()

def late():
    pool.submit(done.set)
    print(done.wait(60.0))

atexit.register(late)
"""


def test_a_relay_still_sums_for_others_after_its_own_program_has_ended():
    """Kvstores that the program left open are closed then, when concurrent.futures accepts no more work."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, timeout=SECONDS)
    assert ended.stdout == "True\n"
