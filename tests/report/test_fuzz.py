"""Random bytes: parsing never raises, its result fits into a table and does not depend on the block size."""

import io
import json
import zlib
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dmltrain.report import reading
from dmltrain.report.page import experiment, samples
from dmltrain.report.page.chart import Curve, LineChart
from dmltrain.report.page.pack import Pool
from dmltrain.report.page.sections import experiments
from dmltrain.report.page.sections.section import Context
from dmltrain.report.page.source import Sources
from dmltrain.report.runs import block
from dmltrain.report.runs.run import Run, merge
from dmltrain.report.summaries.series import AXES, TEST_ERROR, points
from dmltrain.report.summaries.summary import COLUMNS, summary
from dmltrain.report.table import AGGREGATES, table
from dmltrain.report.text import FORMATS
from tests.fuzzing import Fuzzed, parts, survive
from tests.report import test_csv_logs, test_cut_off, test_facts, test_pmls
from tests.report.page import written
from tests.tiers import examples

PARTS = [
    *(b"Epoch[", b"0", b"1", b"17", b"] ", b"]", b"[Epoch ", b"Iteration[", b"Iter[", b"Batch [20]", b"accuracy="),
    *(b"\tSpeed: 5.5 samples/sec\t", b"[", b"Validation-", b"Time cost=", b"training: ", b"validation: "),
    *(b"err-top1=", b"0.5", b"0.250000", b"nan", b"-inf", b"1.2e-05", b"43%", b"=", b":", b" ", b"\n", b"\n", b"\r"),
    *(b"\r\n", b"#011", b"\\n", b"\x1b[31m", b"\x1b", b"\0", b"Node[0] ", b"Node[1] ", b"Epoch 1/5\n", b"x" * 50, b"."),
    *(b"12s - loss: 0.5 - acc: 0.5", b"5/5 [==] - ", b"ETA: ", b"solver.cpp", b"solver.cpp:9] ", b"Iteration 5, "),
    *(b"Testing net (#0)", b"Test net output #0: accuracy = ", b"loss = ", b"\xff\xfe", b"\xc3\xa9"),
    b"Train-accuracy=",
]
TABLE_PARTS = [
    *(b"epoch,loss,val_acc\n", b"epoch;step;loss_step;loss\n", b"Wall time,Step,Value\n", b"0,0.5,0.25\n"),
    *(b"1,0.75,0.5", b"Iteration,time,loss,accuracy,\n", b"Test loss: 1.5\n", b"1_0", b"+3", b'"', b",", b";"),
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


ARGUMENTS = "INFO:root:start with arguments Namespace(batch_size=64, kv_store='dist_sync')\n"
MXNET = (ARGUMENTS + test_cut_off.OURS[:1500] + "Node[1] Epoch[1] Train-accuracy=nan\n").encode()
SEEDED = Fuzzed(
    show_one,
    lambda: [MXNET, *(log.encode() for log in (test_cut_off.KERAS, test_cut_off.CAFFE, test_cut_off.GLUON))],
    (),
    tuple(PARTS),
)


def tables() -> list[bytes]:
    csv = (test_csv_logs.KERAS.replace("0.5,1.5", '0.5,"[1.5, 2]"').replace("\n", "\r\n"), test_csv_logs.LIGHTNING)
    own = (test_pmls.log(), test_pmls.TRAIN + test_pmls.TEST)
    return [log.encode() for log in (*csv, test_csv_logs.TENSORBOARD, *own)]


CSV_PARTS = tuple(b'epoch step loss val_ acc , ; " ,, _'.split(b" ")) + (b"\t", b"\n", b"\r\n", b"0,0.5\n")
TABLES = Fuzzed(show_one, tables, (), CSV_PARTS)


def show_summary(log: bytes) -> list[str]:
    """The summary's row of each run of `log`, and its points over every axis."""
    survey = reading.survey(io.BytesIO(log))
    runs = [merge("x.log", [("x.log", one)], heads=(survey.head,)) for one in survey.runs]
    runs = runs or [Run("x.log", heads=(survey.head,))]
    shown = [str(points(run, TEST_ERROR, x)) for run in runs for x in AXES]
    return shown + [COLUMNS[name].show(value) for run in runs for name, value in summary(run).items()]


INTRODUCTION = test_facts.INTRODUCTION.format(rank=0, host="a") + "INFO:root:Start training with [gpu(0), gpu(1)]\n"
SUMMARY = Fuzzed(
    show_summary,
    lambda: [INTRODUCTION.encode(), MXNET, test_cut_off.KERAS.encode()],
    (),
    (b"Options(", b"Namespace(", b"cores", *PARTS),
)


CSV = b"""\
time,host,cpu,memory,job_cpu,job_memory,gpu,gpu_memory
1763812800.000,h0,0.912,0.310,1.824,1024.0,,
1763812800.000,h1,0.500,0.210,0.924,1000.0,0.87,8012.0
1763812802.000,h0,0.913,0.311,1.826,1025.0,,
"""


def show_samples(content: bytes) -> str:
    """The hosts of a usage.csv, as charts."""
    hosts = samples.parse(content.decode("utf-8", "replace").splitlines(keepends=True))
    curves = [Curve(0, host.name, host.time, numbers) for host in hosts for numbers in host.values.values()]
    return json.dumps(LineChart("a", "a", "a", "a", curves).json(Pool(), 8))


def show_results(content: bytes) -> object:
    """The section of an experiment."""
    found = experiment.parse("folder", content)
    return experiments.section(Context(Sources(experiments=(found,))))


SAMPLES = Fuzzed(show_samples, lambda: [CSV], (), (b'"', b",", b"\r", b"\0", b"nan", b"inf", b"1e999", b"-1", b"\n"))
EXPERIMENT = Fuzzed(
    show_results,
    lambda: [json.dumps(written.RESULTS).encode(), json.dumps(written.RESULTS, indent=1).encode()],
    (ValueError,),
    (b"null", b"[]", b"{}", b"[" * 100, b"1e999", b"-1", b"../", b'"..", ', b"NaN", b"true", b"<b>"),
)


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("name", ["SEEDED", "TABLES", "SUMMARY", "SAMPLES", "EXPERIMENT"])
def test_mutated_files_can_be_read_and_shown_in_limited_memory_and_time(name: str, part: int) -> None:
    survive(f"tests.report.test_fuzz:{name}", part)


@settings(max_examples=examples(150), deadline=None)
@given(LOGS, st.integers(1, 40))
@example(b"solver.cpp\nIteration 5, loss: 1, time: 2\n", 1)
@example(b"Iteration,time,loss,\n" + 8 * b"\n" + b"Node[0] solver.cpp:9]Iteration 5, loss: 1, time: 2\n", 1)
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
