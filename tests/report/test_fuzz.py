"""Random bytes: parsing never raises, its result fits into a table and does not depend on the block size."""

import io
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dmltrain.errors import UserError
from dmltrain.report import block, job_record, reading
from dmltrain.report.run import Run, merge
from dmltrain.report.series import AXES, TEST_ERROR, points
from dmltrain.report.summary import COLUMNS, summary
from dmltrain.report.table import AGGREGATES, table
from dmltrain.report.text import FORMATS
from tests.fuzzing import Fuzzed, parts, survive
from tests.tiers import examples

PARTS = [
    *(b"Epoch[", b"0", b"1", b"17", b"] ", b"]", b"[Epoch ", b"Iteration[", b"Iter[", b"Batch [20]", b"accuracy="),
    *(b"\tSpeed: 5.5 samples/sec\t", b"[", b"Validation-", b"Time cost=", b"training: ", b"validation: "),
    *(b"err-top1=", b"0.5", b"0.250000", b"nan", b"-inf", b"1.2e-05", b"43%", b"=", b":", b" ", b"\n", b"\n", b"\r"),
    *(b"\r\n", b"#011", b"\\n", b"\x1b[31m", b"\x1b", b"\0", b"Node[0] ", b"Node[1] ", b"Epoch 1/5\n", b"x" * 50, b"."),
    *(b"12s - loss: 0.5 - acc: 0.5", b"5/5 [==] - ", b"ETA: ", b"solver.cpp", b"solver.cpp:9] ", b"Iteration 5, "),
    *(
        b"Testing net (#0)",
        b"Test net output #0: accuracy = ",
        b"loss = ",
        b"\xff\xfe",
        b"\xc3\xa9",
        b"Train-accuracy=",
    ),
]
TABLE_PARTS = [
    *(
        b"epoch,loss,val_acc\n",
        b"epoch;step;loss_step;loss\n",
        b"Wall time,Step,Value\n",
        b"0,0.5,0.25\n",
        b"1,0.75,0.5",
    ),
    *(b"Iteration,time,loss,accuracy,\n", b"Test loss: 1.5\n", b"1_0", b"+3", b'"', b",", b";"),
    *(b"solver.cpp:9] Iteration 5, loss: 1.5, time: 2.5\n", b"Train net output #0: acc = 0.5\n"),
]
LOGS = st.one_of(
    st.binary(max_size=300),
    st.lists(st.one_of(st.sampled_from(TABLE_PARTS), st.sampled_from(PARTS)), max_size=60).map(b"".join),
    st.lists(st.one_of(st.sampled_from(PARTS), st.binary(max_size=3)), max_size=60).map(b"".join),
)


FORMS = [(shape, how) for shape in FORMATS.values() for how in AGGREGATES]


def show(log: bytes, forms: Sequence[tuple[Callable, str]] = FORMS) -> list[str]:
    """These forms of report of `log`."""
    found, fault = reading.scan(io.BytesIO(log))
    assert bool(found) != bool(fault)
    runs = [merge("x.log", [("x.log", one)], part) for part, one in enumerate(found)]
    return [shape([table(run, how) for run in runs], ["accuracy", "loss"]) for shape, how in forms]


def show_one(log: bytes) -> list[str]:
    """One form of report of `log`: another for other logs, so that thousands of them have each often."""
    return show(log, [FORMS[zlib.crc32(log) % len(FORMS)]])


MXNET = b"""\
INFO:root:start with arguments Namespace(batch_size=64, kv_store='dist_sync')
INFO:root:Node[0] Epoch[0] Batch [20]\tSpeed: 950.11 samples/sec\taccuracy=0.113095
INFO:root:Node[0] Epoch[0] Train-accuracy=0.250000
INFO:root:Node[0] Epoch[0] Time cost=12.345
INFO:root:Node[0] Epoch[0] Validation-accuracy=0.310000
2026-01-02 03:04:05,678 Node[1] Epoch[1] Train-accuracy=nan
"""
KERAS = b"""\
Epoch 1/2
5/5 [==============================] - 12s 2s/step - loss: 0.5000 - acc: 0.5000 - val_loss: 0.4 - val_acc: 0.6
Epoch 2/2
5/5 [==============================] - 11s 2s/step - loss: 0.2500 - acc: 0.7500 - val_loss: 0.3 - val_acc: 0.7
"""
CAFFE = b"""\
I0102 03:04:05.678901 12345 solver.cpp:330] Iteration 0, Testing net (#0)
I0102 03:04:05.678901 12345 solver.cpp:397]     Test net output #0: accuracy = 0.1
I0102 03:04:06.678901 12345 solver.cpp:218] Iteration 100 (50 iter/s, 2s/100 iters), loss = 0.5
"""
GLUON = b"""\
INFO:root:Epoch[0] Batch [19]\tSpeed: 5.5 samples/sec\taccuracy=0.5
INFO:root:[Epoch 0] training: accuracy=0.500000
INFO:root:[Epoch 0] time cost: 43.210000
INFO:root:[Epoch 0] validation: err-top1=0.600000 err-top5=0.2
"""
SEEDED = Fuzzed(show_one, lambda: [MXNET, KERAS, CAFFE, GLUON], (), tuple(PARTS))
PMLS = b"""\
I0102 03:04:05.678901 12345 solver.cpp:330] Iteration 0, Testing net (#0)
I0102 03:04:05.678901 12345 solver.cpp:341] Test loss: 2.3
I0102 03:04:05.678901 12345 solver.cpp:397]     Test net output #0: accuracy = 0.1
I0102 03:04:06.678901 12345 solver.cpp:218] Iteration 0, loss: 2.5, time: 0.5
I0102 03:04:06.678901 12345 solver.cpp:218]     Train net output #0: loss = 2.5 (* 1 = 2.5 loss)
I0102 03:04:06.678901 12345 solver.cpp:218] Iteration 100, model version: 7, loss: 1.64, time: 141.8
"""
NET_OUTPUTS = b"""\
Iteration,time,loss,loss,
0,0.5,2.5,2.5,
100,141.8,1.64,1.64,

Iteration,time,loss,accuracy,loss,
0,0.25,0,0.1,2.25,

"""
CSV_LOGGER = b"""\
epoch,accuracy,loss,lr,val_accuracy\r
0,0.25,2.0,0.1,0.3\r
1,0.5,"[1.5, 2]",0.1,NA\r
"""
LIGHTNING = b"""\
epoch,step,train_loss_step,train_loss_epoch,val_acc
,0,,,
0,49,0.71,,
0,390,,1.21,
1,781,,,0.5521
"""
TENSORBOARD = b"Wall time,Step,Value\n1700000000.5,0,0.46\n1700000010.75,1,0.55\n"
CSV_PARTS = (
    *(b"epoch", b"step", b"loss", b"val_", b"acc", b",", b";", b"\t", b'"', b"\n", b"\r\n", b"0,0.5\n", b",,", b"_"),
)
TABLES = Fuzzed(show_one, lambda: [PMLS, NET_OUTPUTS, CSV_LOGGER, LIGHTNING, TENSORBOARD], (), CSV_PARTS)

INTRODUCTION = b"""\
2026-01-02 03:04:05,678 Node[0] dmltrain 0.5.0: train.py --lr 0.1
2026-01-02 03:04:05,678 Node[0] start with arguments Options(network='resnet', lr=0.1, gpus=(), crop=None, mom=-0.9)
2026-01-02 03:04:05,678 Node[0] Network resnet-20: 272541 parameters, input 3x32x32, 10 classes, float32
2026-01-02 03:04:05,678 Node[0] Data cifar10 in data: 50000 training and 10000 validation samples
2026-01-02 03:04:05,678 Node[0] Host a: EPYC, 2 cores, 23.5 GiB memory, Linux 6.1, Python 3.11.7, torch 2.1, 1 threads
2026-01-02 03:04:05,678 Node[0] Batch 64 per worker, 128 in all; seed 0
2026-01-02 03:04:05,678 Node[0] Start training with 1 x cpu, 2 workers, dist_async
2026-01-02 03:04:05,678 Node[0] Training epochs 0 to 3, 391 batches each
2026-01-02 03:04:05,678 Node[0] Epoch[0] Train-accuracy=0.5
2026-01-02 03:04:05,678 Node[0] Epoch[0] Time cost=1.5
INFO:root:Start training with [gpu(0), gpu(1)]
"""


def show_summary(log: bytes) -> list[str]:
    """The summary's row of each run of `log`, and its points over every axis."""
    survey = reading.survey(io.BytesIO(log))
    runs = [merge("x.log", [("x.log", one)], heads=(survey.head,)) for one in survey.found]
    runs = runs or [Run("x.log", heads=(survey.head,))]
    shown = [str(points(run, TEST_ERROR, x)) for run in runs for x in AXES]
    return shown + [COLUMNS[name].show(value) for run in runs for name, value in summary(run).items()]


SUMMARY = Fuzzed(show_summary, lambda: [INTRODUCTION, MXNET, KERAS], (), (b"Options(", b"Namespace(", b"cores", *PARTS))


RECORD = Fuzzed(
    lambda content: job_record.parse("job.json", content),
    lambda: [path.read_bytes() for path in sorted(Path("logs/reference").glob("*/job.json"))],
    (UserError,),
    (b'"hosts"', b'"name"', b"null", b"[]", b"{}", b'"format": 1,', b"1e999", b"-1"),
)


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("name", ["SEEDED", "TABLES", "SUMMARY", "RECORD"])
def test_mutated_logs_and_records_can_be_read_and_shown_in_limited_memory_and_time(name: str, part: int) -> None:
    survive(f"tests.report.test_fuzz:{name}", part)


@settings(max_examples=examples(300), deadline=None)
@given(LOGS, st.integers(1, 40))
@example(b"solver.cpp\nIteration 5, loss: 1, time: 2\n", 1)
@example(b"epoch,,loss\nsolver.cpp:\n0,0,", 1)
@example(b"\xfe\xffsolver.cpp:9]Iteration 5, loss: 1, time: 2\n", 1)
@example("\nsolver.cpp:9]Iteration 5, loss: 1, time: 2\n".encode("utf-16-le"), 1)
@example(b"\n", 1)
@example(b"epoch,,loss\n] Finished in \n0,0,", 1)
@example(b"epoch,,loss\nEpoch 1/2\n0,0,", 1)
def test_results_do_not_depend_on_the_read_size(log: bytes, size: int) -> None:
    whole = show(log)
    with mock.patch.object(reading, "blocks", lambda stream: block.blocks(stream, size)):
        assert show(log) == whole
