"""A program whose cells take no time: --fail ends it with an error, --wait until a file is there."""

import argparse
import os
import pathlib
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--value", default="")
parser.add_argument("--fail", default="no")
parser.add_argument("--wait", default="")
parser.add_argument("--fill", default="")
options = parser.parse_args()
folder = pathlib.Path("started")
folder.mkdir(exist_ok=True)
(folder / f"{options.value}-{os.getpid()}").touch()
while options.wait and not os.path.exists(options.wait):
    time.sleep(0.02)
if options.fill:  # the disk of the logs
    print("x" * 1_000_000 * int(options.fill), flush=True)
if options.fail == "yes":
    print("no such thing as", options.value, file=sys.stderr)
    sys.exit(3)
print("value", options.value, flush=True)
