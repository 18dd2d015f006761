"""The points of a run over epochs, iterations and time."""

import io
from pathlib import Path

import pytest

from dmltrain import record
from dmltrain.report import reading
from dmltrain.report.run import Run, merge
from dmltrain.report.series import AXES, points
from dmltrain.report.stamp import Clock


def of_text(*texts: str | bytes) -> Run:
    """The run whose workers wrote `texts`."""
    surveys = [reading.survey(io.BytesIO(text if isinstance(text, bytes) else text.encode())) for text in texts]
    files = [(f"worker-{rank}.log", one) for rank, survey in enumerate(surveys) for one in survey.found]
    return merge("x.log", files, heads=[survey.head for survey in surveys])


def log(*lines: tuple[str, str], prefix: str = "Node[0] ") -> str:
    return "".join(f"{time} {prefix}{text}\n" for time, text in lines)


DAY = "2026-11-20"
TWO_EPOCHS = log(
    (f"{DAY} 23:59:50,000", "Batch 50 per worker, 100 in all; seed 0"),
    (f"{DAY} 23:59:50,000", "Start training with 1 x cpu, 2 workers, dist_sync"),
    (f"{DAY} 23:59:50,000", "Training epochs 0 to 1, 391 batches each"),
    (f"{DAY} 23:59:59,000", record.value(0, "Time cost", 8.0)),
    ("2026-11-21 00:00:01,250", record.value(0, "Validation-accuracy", 0.5)),
    ("2026-11-21 00:01:01,250", record.value(1, "Validation-accuracy", 0.75)),
)


def test_every_axis() -> None:
    run = of_text(TWO_EPOCHS)
    assert points(run, "validation_accuracy") == [(1, 0.5), (2, 0.75)]
    assert points(run, "test_error", "iteration") == [(391, 0.5), (782, 0.25)]
    assert points(run, "test_error", "time") == [(11.25, 0.5), (71.25, 0.25)]
    assert [points(run, "no_such", x) for x in AXES] == [[], [], []]
    run = of_text("Epoch[0] Validation-accuracy=43.5\nEpoch[1] Validation-accuracy=0.5\n")  # percent
    assert points(run, "validation_accuracy") == [(1, 0.435), (2, 0.005)]
    assert points(run, "test_error")[0] == (1, pytest.approx(0.565))


def test_times_of_workers_whose_clocks_differ_and_of_logs_without_times() -> None:
    """An epoch ends when its last worker ends it; hours between the clocks do not count."""
    later = TWO_EPOCHS.replace(" 23:", " 20:").replace("2026-11-21 00:", f"{DAY} 21:").replace("01,250", "02,250")
    assert points(of_text(TWO_EPOCHS, later), "validation_accuracy", "time") == [(12.25, 0.5), (72.25, 0.75)]
    lines = [record.value(epoch, "Time cost", 10.0 + epoch) for epoch in (0, 1, 3)]
    lines += [record.value(epoch, "Train-accuracy", 0.5) for epoch in range(4)]
    text = "".join(f"INFO:root:{line}\n" for line in lines)
    assert points(of_text(text), "train_accuracy", "time") == [(10, 0.5), (21, 0.5)]  # not of 3, as 2 has none
    broken = text.replace("cost=11.000", "cost=nan")
    assert points(of_text(broken), "train_accuracy", "time") == [(10, 0.5)]


def test_iterations_of_other_programs() -> None:
    arguments = "Namespace(batch_size=128, num_examples=50000{more})\nEpoch[1] Train-accuracy=0.5\n"
    assert points(of_text(arguments.format(more="")), "train_accuracy", "iteration") == [(782, 0.5)]
    accumulated = arguments.format(more=", macrobatch_size=500")
    assert points(of_text(accumulated), "train_accuracy", "iteration") == [(2 * 98, 0.5)]
    assert points(of_text("Epoch[1] Train-accuracy=0.5\n"), "train_accuracy", "iteration") == []


def test_real_logs(logs: Path) -> None:
    (run,) = reading.read(str(logs / "other" / "caffe_squeezenet224_2gpu.log"))
    assert points(run, "validation_accuracy", "iteration")[-1] == (170000, 0.59202)
    assert points(run, "validation_accuracy", "epoch") == []
    times = [x for x, _ in points(run, "validation_accuracy", "time")]
    assert len(times) == len(run.epochs)
    assert times == sorted(times)
    first = log(("I1231 23:59:59.5 27501", "Iteration 0, Testing net (#0)"), prefix="solver.cpp:341] ")
    first += log(("I1231 23:59:59.9 27501", "Test net output #0: accuracy = 0.1"), prefix="solver.cpp:409]     ")
    second = first.replace("I1231 23:59:59", "I0101 00:00:01").replace("Iteration 0", "Iteration 500")
    passed = points(of_text(first + second), "validation_accuracy", "time")
    assert passed == [(0, 0.1), (2, 0.1)]  # over the new year, in a year of 366 days
    (run,) = reading.read(str(logs / "mxnet" / "mxnet_nb_module_cifar10_1.log"))
    times = [x for x, _ in points(run, "train_accuracy", "time")]
    assert (len(times), times[0]) == (20, pytest.approx(104, abs=6))
    (run,) = reading.read(str(logs / "mxnet" / "mxnet_cifar10_incept_2.log"))
    assert points(run, "train_accuracy", "time")[0] == (70.614, 0.538261)


LINES = {
    **{"2026-11-20 12:00:01,500 Node[0] x": 1.5, "[worker-1] 2026-11-20 12:01:00 x": 60.0},
    **{"2026-11-20T13:00:00.25 x": 3600.25, "[11/21/2026 12:00:00 INFO 1] x": 86400.0, "x": None},
    **dict.fromkeys(("2026-11-20 01:00:00 PM x", "2026-11-20 25:00:00 x", "2026-11-20 11:59:59 x")),
    f"{'y' * 300} 2026-11-20 12:00:01 x": None,
}


@pytest.mark.parametrize("line", LINES)
def test_times_of_lines(line: str) -> None:
    data = f"2026-11-20 12:00:00,000 start\n{line}\n".encode()
    clock = Clock()
    for block in reading.blocks(io.BytesIO(data)):
        clock.feed(block)
    assert clock.seconds(data, data.index(b"x", 30)) == LINES[line]
