"""Images per second that are read from RecordIO, decoded, changed at random and cropped: dmltrain and MXNet's reader.

Both write uint8 batches of the same shape with the same options. Each figure is of a process of its own, after one pass
over the file; systems take turns, a figure is the median, and ratios are medians over turns. CPU seconds are those of
all threads of the process. MXNet decides itself how many of the threads that it is given it uses.

    python benchmarks/images.py --data-train train.rec [--threads 1,2] [--turns 5] [--cases ...] [--format table|json]
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from report import facts, fail, installed, show, spread

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dmltrain.data.assignment.parts import Shared
from dmltrain.data.batches import EvalBatches, TrainBatches
from dmltrain.data.broken import SkippedRecords
from dmltrain.data.decoded import Decoded
from dmltrain.data.images import ImageAugmentation, augmentation_level
from dmltrain.data.readers import open_reader

SHAPE = (3, 224, 224)
BATCH = 32
CLASSES = 1 << 24  # labels that float32 counts
CROP = {
    "random_resized_crop": True,
    "random_mirror": True,
    "min_random_area": 0.08,
    "min_random_aspect_ratio": 3 / 4,
    "max_random_aspect_ratio": 4 / 3,
}
COLOURS = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "pca_noise": 0.1}
CASES = {
    "centre crop of 256": {"resize": 256},
    "resized crop, mirror": CROP,
    "resized crop, mirror, colours, noise": {**CROP, **COLOURS},
    "level 3 of 256": {"resize": 256, **augmentation_level(3)},
    "all colours and geometry": {
        "resize": 256,
        **augmentation_level(3),
        **COLOURS,
        "pad_size": 4,
        "min_random_scale": 0.9,
        "max_random_scale": 1.1,
    },
}
SYSTEMS = ("dmltrain", "mxnet")


def dmltrain_epochs(path: str, augmentation: ImageAugmentation, threads: int, training: bool = True) -> Iterator[int]:
    """One epoch after another, as a training program reads them, or tests on them; yields how many images each had."""
    reader = open_reader(path)
    samples = Decoded(reader, len(reader), augmentation, SHAPE, CLASSES, SkippedRecords(0, print))
    parts = Shared(len(reader), 1, BATCH, len(reader))
    for epoch in itertools.count():
        part = parts.part(0, 0, epoch)
        batches = TrainBatches(samples, part, threads) if training else EvalBatches(samples, part.order, BATCH)
        yield sum(len(batch.labels) for batch in batches)


def mxnet_epochs(path: str, augmentation: ImageAugmentation, threads: int) -> Iterator[int]:
    """The same by mx.io.ImageRecordIter."""
    import mxnet

    names = {field.name: field.metadata["mxnet"] for field in dataclasses.fields(augmentation)}
    changed = {
        names[name]: value for name, value in vars(augmentation).items() if value not in (None, ()) and name in names
    }
    batches = mxnet.io.ImageRecordIter(
        path_imgrec=path,
        path_imgidx=str(Path(path).with_suffix(".idx")),
        shuffle=True,
        data_shape=SHAPE,
        batch_size=BATCH,
        preprocess_threads=threads,
        dtype="uint8",
        **changed,
    )
    while True:
        images = 0
        for batch in batches:
            batch.data[0].wait_to_read()
            images += BATCH - batch.pad
        yield images
        batches.reset()


def measure(system: str, path: str, case: str, threads: int, seconds: float) -> dict[str, float]:
    """Images per second and per CPU second of passes over the file, for at least `seconds`."""
    epochs = (dmltrain_epochs if system == "dmltrain" else mxnet_epochs)(
        path, ImageAugmentation(**CASES[case]), threads
    )
    next(epochs)
    images, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        images += next(epochs)
    return {
        "images_per_second": images / (time.perf_counter() - start),
        "images_per_cpu_second": images / (time.process_time() - cpu),
    }


def in_a_process(arguments: argparse.Namespace, system: str, case: str, threads: int) -> dict[str, float]:
    """The figures of `measure` in a new process."""
    options = ["--one", system, "--data-train", arguments.data_train, "--cases", case, "--threads", str(threads)]
    command = [sys.executable, __file__, *options, "--seconds", str(arguments.seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{system}, {case}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(arguments: argparse.Namespace) -> dict:
    """All figures and the conditions of the measurement, as JSON values."""
    turns = [
        {
            (case, threads, system): in_a_process(arguments, system, case, threads)
            for case in arguments.cases
            for threads in arguments.threads
            for system in SYSTEMS
        }
        for _ in range(arguments.turns)
    ]
    rows = [row(turns, case, threads) for case in arguments.cases for threads in arguments.threads]
    versions = {name: installed(name) for name in ("dmltrain", "mxnet", "simplejpeg", "opencv-python-headless")}
    return {**facts("images.py", None, versions), "rows": rows}


def row(turns: list[dict], case: str, threads: int) -> dict:
    """One line of the table: medians, and medians of the ratios of each turn."""
    first = min(each[1] for each in turns[0])
    found: dict = {"case": case, "threads": threads}
    for unit in ("images_per_second", "images_per_cpu_second"):
        of = {system: [turn[case, threads, system][unit] for turn in turns] for system in SYSTEMS}
        found[unit] = {system: spread(values) for system, values in of.items()}
        found[f"{unit}_ratio"] = statistics.median(a / b for a, b in zip(of["dmltrain"], of["mxnet"], strict=True))
    found["to_fewest_threads"] = statistics.median(
        turn[case, threads, "dmltrain"]["images_per_second"] / turn[case, first, "dmltrain"]["images_per_second"]
        for turn in turns
    )
    return found


def table(result: dict) -> str:
    """The report as text."""
    about = result["machine"]
    lines = [
        f"{about['processor']}, {about['cores']} cores; images/s and images per CPU second to 224x224, medians",
        "",
        f"{'':38}{'threads':>8}{'dmltrain':>16}{'MXNet':>14}{'ratios':>13}{'to one':>8}",
    ]
    for each in result["rows"]:
        speed, cpu = each["images_per_second"], each["images_per_cpu_second"]
        cells = [f"{speed[system]['median']:.0f}, {cpu[system]['median']:.0f}" for system in SYSTEMS]
        ratios = f"{each['images_per_second_ratio']:.2f}, {each['images_per_cpu_second_ratio']:.2f}"
        lines.append(
            f"{each['case']:38}{each['threads']:8}{cells[0]:>16}{cells[1]:>14}{ratios:>13}"
            f"{each['to_fewest_threads']:8.2f}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-train", required=True, metavar="FILE.rec")
    parser.add_argument("--threads", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement, at least")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        (case,), (threads,) = arguments.cases, arguments.threads
        print(json.dumps(measure(arguments.one, arguments.data_train, case, threads, arguments.seconds)))
        return 0
    try:
        show(report(arguments), arguments.format, table)
    except RuntimeError as error:
        return fail("images.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
