"""Logs of runs as dmltrain writes them, with numbers that are computed: large ones, and strange ones."""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from dmltrain.logs import record

BATCHES_SHOWN = 2  # lines of batches in an epoch


def run(folder: Path, epochs: int = 6, workers: int = 3, seed: int = 0, host: str = "h", **more: object) -> Path:
    """The log folder of a job. `more` are fields of its job.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(workers):
        lines = [*_head(workers, epochs, f"{host}{rank}"), *_epochs(rank, epochs, seed)]
        (folder / f"worker-{rank}.log").write_text("".join(_stamped(lines, rank)))
    (folder / "server-0.log").write_text("serving\n")
    (folder / "job.json").write_text(json.dumps(job(workers) | more, indent=2))
    return folder


def _stamped(lines: Sequence[str], rank: int) -> Iterator[str]:
    """Each line with its time: an epoch takes as long as it says."""
    now = datetime(2026, 11, 22, 12)
    for line in lines:
        _, _, seconds = line.partition(" Time cost=")
        now += timedelta(seconds=float(seconds or 0))
        yield f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d} Node[{rank}] {line}\n"


def job(workers: int) -> dict[str, object]:
    ended = {"pid": 9, "exit_code": 0, "signal": None}
    times = {"started": "2026-11-22T12:00:00+0000", "ended": "2026-11-22T12:02:03+0000", "seconds": 123.4}
    return {
        **{"format": 1, "job": "demo", "command": ["train.py", "--lr", "0.1"], "launcher": "ssh", **times},
        **{"num_workers": workers, "num_servers": 1, "exit_code": 0, "cause": None, "restarts": []},
        "versions": {"dmltrain": "0.4.0", "python": "3.11.7"},
        "hosts": [{"name": f"h{rank}", "address": f"10.0.0.{rank}"} for rank in range(workers)],
        "processes": [{"role": "worker", "rank": rank, "host": f"h{rank}", **ended} for rank in range(workers)],
    }


def _head(workers: int, epochs: int, host: str) -> list[str]:
    return [
        f"dmltrain 0.4.0: train.py --lr 0.1 --num-epochs {epochs}",
        "start with arguments Options(network='resnet', num_layers=20, batch_size=64, lr=0.1, kv_store='dist_ssp')",
        "Network resnet-20: 272541 parameters, input 3x32x32, 10 classes, float32",
        f"Host {host}: AMD EPYC, 2 cores, 23.5 GiB memory, Linux 6.1, Python 3.11.7, torch 2.13.0+cpu, 1 threads",
        f"Batch 64 per worker, {64 * workers} in all; seed 0",
        f"Start training with 1 x cpu, {workers} workers, dist_ssp",
        record.plan(0, epochs - 1, 100),
    ]


def _epochs(rank: int, epochs: int, seed: int) -> list[str]:
    lines = []
    for epoch in range(epochs):
        wave = math.sin(epoch * (1 + seed) + rank) / 100
        accuracy = 0.95 - 0.85 * math.exp(-(epoch + 1) / (20 + 5 * seed)) + wave
        compute, wire, straggler = 9 + wave * 50, 2 + rank / 10, 0.3 * (1 + math.cos(epoch + rank))
        parts = {"bound": 0.8, "compute": compute, "own-host": 0.2, "wire": wire, "server": 0.4, "straggler": straggler}
        values = {
            **{"Train-accuracy": accuracy, "Train-cross-entropy": -math.log(accuracy)},
            **{"Time cost": compute + wire + straggler + 0.6, "Validation-accuracy": accuracy - 0.03},
            **{"Validation-cross-entropy": -math.log(accuracy - 0.03), "Speed": 1700 + 100 * wave},
            **{"Memory": 500.0 + epoch, "Sent": 426378308 + 1000 * rank + epoch, "Learning-rate": 0.1},
            **{"Received": 428502236 + 1000 * rank + epoch, "Staleness": 1 + rank / 10 + wave},
        }
        lines += [record.batch(epoch, 50 * batch, 1700, {"accuracy": accuracy}) for batch in range(BATCHES_SHOWN)]
        lines += [record.value(epoch, name, value) for name, value in values.items()]
        lines.append(record.communication(epoch, parts))
        lines.append(record.usage(epoch, {"cpu": 1.8 + wave, "host-cpu": 0.95 + wave, "memory": 512.0 + epoch}))
    return lines


def samples(folder: Path, hosts: int = 2, count: int = 30) -> None:
    """A usage.csv."""
    rows = ["time,host,cpu,memory,job_cpu,job_memory,gpu,gpu_memory"]
    for at in range(count):
        for host in range(hosts):
            busy = 0.9 + 0.1 * math.sin(at + host)
            rows.append(f"{1763812800 + 2 * at}.000,h{host},{busy:.3f},0.310,{2 * busy:.3f},{1024 + at}.0,,")
    (folder / "usage.csv").write_text("\n".join(rows) + "\n")


# the results.json of an experiment
MEASURED = {"mean": 0.75, "spread": 0.01, "count": 3}
FIGURES = {"accuracy": {"value": 0.93, "shown": "0.93", "printed": 93, "error": "printed as 93: in percent"}}
FAILED = {"status": "error", "error": "killed", "log": "cells/devices=2/worker-0.log"}
RESULTS = {
    "title": "ResNets <b>",
    "small": "2 epochs instead of 12",
    "caption": ["On h0."],
    "sentences": ["The fastest is devices 2."],
    "plots": [{"file": "plots/1-speed.svg", "title": "speed-up"}, {"file": "../secret.svg", "title": "no"}],
    "columns": [{"key": "devices", "heading": "devices"}, {"key": "accuracy", "heading": "top-1"}],
    "rows": [
        {"settings": {"devices": 1}, "status": "done", "values": {"accuracy": MEASURED}, "cells": ["devices=1", ".."]},
        {"settings": {"devices": 2}, "cells": ["devices=2"], **FAILED},
    ],
    "published": [{"title": "Theirs", "source": "a paper", "note": "", "rows": [FIGURES]}],
}
