"""Images per second that networks classify, by batch size: MXNet's example/image-classification/benchmark_score.py.

    python benchmarks/inference.py [--network resnet-50,vgg-16] [--batch-size 1,32] [--backend torch,mxnet] [--gpus 0]

Images are random, of the network's usual size, and bytes until they are on the device, where they are normalised. A
trainer computes classes and metrics, as in a validation. Five batches warm up, then ten are timed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from report import PACKAGES, facts, fail, installed, show

sys.path[:0] = PACKAGES  # the dmltrain that is measured lies beside the benchmark

from dmltrain import kvstore, models, options  # noqa: E402
from dmltrain.backends.table import BACKENDS  # noqa: E402
from dmltrain.base.errors import UserError  # noqa: E402
from dmltrain.base.normalisation import Normalisation  # noqa: E402

WARM_UP, BATCHES = 5, 10
SIZES = "1,32,64,128,256"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default=",".join(models.NETWORKS), metavar="NAME[-LAYERS],...")
    parser.add_argument("--batch-size", default=SIZES, metavar="N,...", help="default %(default)s")
    parser.add_argument("--backend", default="torch", metavar="NAME,...", help="default %(default)s")
    parser.add_argument("--dtype", default="float32", help="default %(default)s")
    parser.add_argument("--gpus", default="", help="for example 0; default: the CPU")
    parser.add_argument("--image-shape", help="instead of each network's usual one, for example 3,299,299")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    return parser.parse_args(argv)


def split(name: str) -> tuple[str, int | None]:
    """'resnet-v1-50' -> ('resnet-v1', 50), 'inception-v3' -> ('inception-v3', None)."""
    network, _, depth = name.rpartition("-")
    return (network, int(depth)) if network in models.NETWORKS and depth.isdecimal() else (name, None)


def images_per_second(name: str, batch_size: int, backend: str, arguments: argparse.Namespace) -> float:
    """Raises UserError for a network, backend or device that does not exist."""
    network, depth = split(name)
    words = ["--network", network, "--batch-size", batch_size, "--backend", backend, "--dtype", arguments.dtype]
    words += ["--gpus", arguments.gpus, *(["--num-layers", depth] if depth else [])]
    words += ["--image-shape", arguments.image_shape] if arguments.image_shape else []
    chosen = options.parse([str(word) for word in words])
    shape = chosen.image_shape or models.NETWORKS[network].image_shape
    made = models.create(network, depth, None, shape)
    store = kvstore.create("local", backend=backend)
    trainer = BACKENDS[backend].trainer(made, chosen, store, None, Normalisation((127.0,), (64.0,)))
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (batch_size, *shape), np.uint8)
    labels = draw.integers(0, made.num_classes, batch_size)

    def evaluate(count: int) -> None:
        for _ in range(count):
            trainer.evaluate(images, labels)
        trainer.take_sums()  # waits for the device

    evaluate(WARM_UP)
    began = time.perf_counter()
    evaluate(BATCHES)
    return BATCHES * batch_size / (time.perf_counter() - began)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One cell after another; each is shown on standard error when it is known."""
    cells = []
    for name in arguments.network.split(","):
        for size in map(int, arguments.batch_size.split(",")):
            for backend in arguments.backend.split(","):
                speed = images_per_second(name, size, backend, arguments)
                print(f"network {name}, batch size {size}, {backend}: {speed:.1f} images/s", file=sys.stderr)
                cells.append({"network": name, "batch_size": size, "backend": backend, "images_per_second": speed})
    return cells


def table(result: dict[str, Any]) -> str:
    """A row for each network and backend, a column for each batch size."""
    sizes = sorted({cell["batch_size"] for cell in result["cells"]})
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for cell in result["cells"]:
        rows.setdefault((cell["network"], cell["backend"]), {})[cell["batch_size"]] = cell["images_per_second"]
    lines = [["network", "backend", *(f"batch {size}" for size in sizes)], ["---"] * (len(sizes) + 2)]
    lines += [[*names, *(f"{cells[size]:.1f}" for size in sizes)] for names, cells in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it; 2 for a wrong argument."""
    arguments = parse(None if argv is None else list(argv))
    try:
        cells = measure(arguments)
    except (UserError, ValueError) as error:
        return fail("inference.py", error, 2)
    versions = {name: installed(name) for name in ("dmltrain", *arguments.backend.split(","))}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
    show({"cells": cells, **threads, **facts("inference.py", argv, versions)}, arguments.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
