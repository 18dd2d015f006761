"""Stage "shared": what the servers cost, with one worker and with two that share the GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator

from report import CHECKOUT

from gpu.running import Asked, Row, bar, job

LEAST_ALONE, LEAST_OF_TWO = 0.95, 1.3  # of the speed with the local store; of that with one worker
PROGRAM = str(CHECKOUT / "benchmarks/contest/programs/on_a_gpu.py")
CELLS = {  # workers, servers, and options
    "local": (1, 0, "--kv-store local"),
    "dist_sync, 1 worker": (1, 1, "--kv-store dist_sync"),
    "dist_sync, 2 workers": (2, 1, "--kv-store dist_sync"),
    "steps on servers, 2 workers": (2, 1, "--kv-store dist_sync --update-on-kvstore 1"),
    "TCP, 2 workers": (2, 2, "--kv-store dist_sync --transport tcp"),
    **{f"{name}, 2 workers": (2, 1, f"--kv-store dist_sync --gc-type {name}") for name in ("bf16", "int8", "2bit")},
}


def rows(asked: Asked) -> Iterator[Row]:
    speeds: dict[str, float] = {}
    for name in list(CELLS)[2:3] if asked.small else CELLS:
        row = _measured(name, asked)
        speeds[name] = row.get("images_per_second", 0.0)
        yield {"cell": name, **row}
    one, two = (speeds.get(f"dist_sync, {workers}", 0.0) for workers in ("1 worker", "2 workers"))
    yield bar("dist_sync: two workers train on the GPU, images/s", two, 1e-9)
    if not asked.small:
        yield bar("dist_sync with one worker: share of local", one / max(speeds["local"], 1e-9), LEAST_ALONE)
        yield bar("dist_sync: two workers on the GPU over one", two / max(one, 1e-9), LEAST_OF_TWO)


def _measured(name: str, asked: Asked) -> Row:
    workers, servers, options = CELLS[name]
    case = "resnet 8 4 float32 0" if asked.small else f"resnet 50 {256 // workers} bfloat16 2"
    words = f"-n {workers} -s {servers}".split()
    code, text = job(words, [PROGRAM, *case.split(), *options.split()], 90.0, threads=4)
    found = [json.loads(line[line.index("{") :]) for line in text.splitlines() if '{"images_per_second"' in line]
    if code or len(found) < workers:
        return {"failed": f"ended with {code}: {text[-400:]}"}
    return {
        "images_per_second": round(sum(each["images_per_second"] for each in found), 1),
        "step_ms": round(max(each["step_ms"] for each in found), 2),
        "MiB": round(max(each["MiB"] for each in found)),
    }
