"""Stage "jobs": whole jobs whose workers share the GPU, in each way to exchange gradients; their accuracy is near that
of the same job on CPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from report import CHECKOUT

from gpu.running import Asked, Row, bar, job

NEAR = 0.04  # accuracies
AT_ONCE = 4
WAYS = {  # options of the launcher, and of the program
    "dist_sync": ("-n 2 -s 1", "--kv-store dist_sync"),
    "local": ("-n 1 -s 0", "--kv-store local --batch-size 64"),
    "steps on servers": ("-n 2 -s 1", "--kv-store dist_sync --update-on-kvstore 1"),
    "dist_async": ("-n 2 -s 1", "--kv-store dist_async --lr 0.05"),
    "dist_local": ("-n 2 -s 1", "--kv-store dist_local --local-steps 5"),
    "int8": ("-n 2 -s 1", "--kv-store dist_sync --gc-type int8"),
    "bfloat16": ("-n 2 -s 1", "--kv-store dist_sync --dtype bfloat16"),
    "float16": ("-n 2 -s 1", "--kv-store dist_sync --dtype float16"),
    "elastic": ("-n 2 -s 1 --elastic", "--kv-store dist_sync"),
    "TCP": ("-n 2 -s 2", "--kv-store dist_sync --transport tcp"),
}


def rows(asked: Asked) -> Iterator[Row]:
    names = ["local"] if asked.small else list(WAYS)  # the stage "shared" has workers and servers
    with ThreadPoolExecutor(1 if asked.small else AT_ONCE) as pool:
        for found in pool.map(lambda name: _both(name, asked), names):
            yield from found


def _both(name: str, asked: Asked) -> list[Row]:
    row: Row = {"job": name}
    for device, options in (("CPU", ""), ("GPU", " --gpus 0")):
        launch, program = WAYS[name]
        words = f"{program}{options} --num-epochs {1 if asked.small else 2}"
        words += " --num-examples 320" if asked.small else ""
        code, text = job(launch.split(), [str(CHECKOUT / "examples/train_digits.py"), *words.split()], 100.0)
        accuracies = re.findall(r"Validation-accuracy=([\d.]+)", text)
        row[device] = float(accuracies[-1]) if accuracies else 0.0
        row |= {"failed": text[-300:]} if code else {}
    far = 1.0 if "failed" in row else abs(row["CPU"] - row["GPU"])
    return [row, bar(f"{name}: the accuracy is within {NEAR} of the CPU's", NEAR - far, 0.0)]
