"""The log lines: exact bytes, one write each, and read back, by us and by MXNet's own tool."""

import io
import math
import re
import socket
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dmltrain.logs import record
from dmltrain.logs.metric import Sums
from tests.running_job import ROOT

# ---- writing --------------------------------------------------------------------------------------------------------


def test_lines_are_mxnets() -> None:
    metrics = {"accuracy": 0.3125, "top_k_accuracy_5": 0.75}
    assert record.batch(3, 20, 1733.1234, metrics) == (
        "Epoch[3] Batch [20]\tSpeed: 1733.12 samples/sec\taccuracy=0.312500\ttop_k_accuracy_5=0.750000"
    )
    assert record.value(3, "Train-accuracy", 0.4312) == "Epoch[3] Train-accuracy=0.431200"
    assert record.value(3, "Validation-accuracy", 1.0) == "Epoch[3] Validation-accuracy=1.000000"
    assert record.value(3, "Time cost", 12.3454) == "Epoch[3] Time cost=12.345"
    assert record.plan(0, 3, 391) == "Training epochs 0 to 3, 391 batches each"


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("Speed", 1733.12, "1733.12"),
        ("Memory", 512.3, "512.3"),
        ("Staleness", 1.0, "1.0"),
        ("Staleness", 0.0, "0.0"),
        ("Sent", 123456789012, "123456789012"),
        ("Received", 0, "0"),
        ("Learning-rate", 0.1, "0.1"),
        ("Learning-rate", 1.2e-05, "0.000012"),
        ("Train-loss", 3e-9, "0.000000003"),
        ("Train-accuracy", math.nan, "nan"),
        ("Train-cross-entropy", math.inf, "inf"),
        ("Time cost", 0.0123, "0.0123"),
        ("Train-cross-entropy", -math.inf, "-inf"),
        ("Train-accuracy", 0, "0"),
        ("Train-loss", 1e-40, "1e-40"),
        *(("Train-x", 1e-30, "0." + "0" * 29 + "1"), ("Train-x", 1e-31, "1e-31"), ("Train-x", 1e30, "1e+30")),
        *(("Train-x", -1e30, "-1e+30"), ("Train-x", 0.0, "0.000000"), ("Train-x", 0.001, "0.001000")),
        *(("Train-x", 0.00099, "0.00099"), ("Train-x", 3, "3")),
    ],
)
def test_numbers(name: str, value: float, text: str) -> None:
    assert record.value(7, name, value) == f"Epoch[7] {name}={text}"


@pytest.mark.parametrize("name", ["", "two words", "a=b", "x\ny", "Train-accuracy "])
def test_a_name_that_could_not_be_read_back_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a valid name in a log line"):
        record.value(0, name, 1.0)
    with pytest.raises(ValueError, match="not a valid name in a log line"):
        record.batch(0, 0, 1.0, {name: 1.0})


def test_a_line_is_one_write_with_time_and_rank() -> None:
    """Over a datagram socket: each write of the process arrives as a message of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    program = (
        "from dmltrain.logs import record\n"
        "record.logger(9)\n"  # asked twice: still one line each
        "log = record.logger(2)\n"
        "record.logger(2)\n"
        "log.info(record.value(0, 'Train-accuracy', 0.5))\n"
        "log.info('100% done')\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=theirs.fileno(), check=True)
    ours.settimeout(10)
    messages = [ours.recv(1000).decode() for _ in range(2)]
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.recv(1000)
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(stamp + r" Node\[2\] Epoch\[0\] Train-accuracy=0\.500000\n", messages[0])
    assert re.fullmatch(stamp + r" Node\[2\] 100% done\n", messages[1])


def test_it_imports_only_the_standard_library() -> None:
    program = "import sys; from dmltrain.logs import record; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"numpy", "torch", "mxnet", "matplotlib", "dmltrain.report"} & set(done.stdout.split())


# ---- reading --------------------------------------------------------------------------------------------------------


KEYS = {  # section of the log -> key -> names that mean it there
    "": {
        "train_accuracy": ("Train-accuracy", "train"),
        "validation_accuracy": ("Validation-accuracy", "val_acc", "val", "eval"),
        "test_accuracy": ("Test-accuracy", "testing-acc", "test"),
        "seconds": ("Time cost", "time cost", "time", "Time_cost", "time-cost", "training cost"),
        "learning_rate": ("Learning-rate", "lr"),
        "train_loss": ("loss",),
        "train_top_k_accuracy_5": ("Train-top_k_accuracy_5",),
        "train_cross_entropy": ("Train-cross-entropy",),
        "train_x": ("training x",),
        "validation_top_k_accuracy_5": ("Validation-acc-top5",),
        "validation_correct_count": ("Validation-correct-count",),
        "validation_x": ("valid-x",),
        **{"speed": ("Speed",), "device_memory": ("Device-Memory",)},
        **{"a_b": ("_a..b_",), "x_x": ("X-x",), "acc_1": ("acc@1",)},
    },
    "train": {"learning_rate": ("lr",), "train_accuracy": ("acc@1",), "train_top_k_accuracy_5": ("acc5",)},
    "validation": {
        "validation_accuracy": ("acc-top1", "prec@1"),
        "validation_top_k_accuracy_5": ("acc_top5", "accuracy_top5"),
        **{"validation_err_top1": ("err-top1",), "validation_loss": ("loss",), "seconds": ("time",)},
    },
    "test": {"test_loss": ("loss",)},
}


@pytest.mark.parametrize(
    ("section", "key", "name"),
    [(section, key, name) for section, keys in KEYS.items() for key, names in keys.items() for name in names],
)
def test_keys(section: str, key: str, name: str) -> None:
    assert record.key(name, section) == key


READ = {
    **{"0.5": 0.5, ".5": 0.5, "5.": 5, "0": 0, "-3": -3, "0.859832935560859": 0.859832935560859},
    **{"1.2e-05": 1.2e-05, "1E+3": 1000, "1E-3": 0.001, "1e999": math.inf, "-inf": -math.inf},
    **{"-1.#IND": math.nan, "1.#QNAN": math.nan, "-nan(ind)": math.nan, "1.#INF": math.inf, "-1.#INF00": -math.inf},
    **{"nan": math.nan, "-nan": math.nan, "NaN": math.nan, "43.12%": 43.12, "12.5s": 12.5, "12.5 sec": 12.5},
    **{"0.5, b": 0.5, "0.5,b=1": 0.5, "0.5)": 0.5, '0.5\\n"': 0.5, "0.5#011b": 0.5, "0.5.": 0.5},
}


@pytest.mark.parametrize(("text", "value"), READ.items())
def test_numbers_are_read(text: str, value: float) -> None:
    found = record.pairs(f"a={text}".encode())[0].value
    assert found == value or (math.isnan(found) and math.isnan(value))


NO_NUMBERS = "abc 0.5.6 0,4312 12:30:45 1.#QN 0x1F 1_000 0.5Epoch 2026-11-20 - e5 12ms 1.2.3 0.29INFO:root"


@pytest.mark.parametrize("text", ["", *NO_NUMBERS.split()])
def test_text_that_is_not_a_number_is_ignored(text: str) -> None:
    assert record.pairs(f"a={text}".encode()) == []


ODD_NAMES = {  # any text up to the value -> its key
    **{"mAP@.5": "map_5", "mAP@[.5:.95]": "map_5_95", "F1(macro)": "f1_macro", "5-shot": "5_shot", "acc%": "accuracy"},
    **{"factorized_top_k/top_1_categorical_accuracy": "factorized_top_k_top_1_categorical_accuracy"},
    **{"top-3-accuracy": "top_k_accuracy_3", "Genauigkeit_für_Größe": "genauigkeit_für_größe", "准确率": "准确率"},
}


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("between", [" ", "\t", ", "])  # `0.5,5-shot` may be a number with a decimal comma
@pytest.mark.parametrize("sign", ["=", ": "])
def test_a_metric_may_have_any_name_and_nothing_after_it_is_lost(name: str, between: str, sign: str) -> None:
    text = between.join(f"{each}{sign}0.25" for each in ("loss", name, "last"))
    found = [(pair.key, pair.value) for pair in record.pairs(text.encode(), "train")]
    key = f"train_{ODD_NAMES[name]}"
    assert found == [("train_loss", 0.25), (key, 0.25), ("train_last", 0.25)]


@pytest.mark.parametrize("name", [*ODD_NAMES, "mAP@.5:.95", "my own metric", "a-b - c"])
def test_in_a_list_a_name_may_have_blanks_and_colons(name: str) -> None:
    text = f"loss: 0.25 | no value | {name}: 0.5 | val_{name}: nan(ind) | last=1"
    keys = [pair.key for pair in record.pairs_of_list(text.encode(), b" | ", "train")]
    key = record.key(name, "train").removeprefix("train_")
    assert keys == ["train_loss", f"train_{key}", f"validation_{key}", "train_last"]


def test_blanks_in_a_name_that_mxnet_prints() -> None:
    pairs = record.pairs(b"Train-my metric=0.5 Train-x=0.25\tmy other=1\tTime cost=1.5")
    assert {pair.key: pair.value for pair in pairs} == {
        **{"train_my_metric": 0.5, "train_x": 0.25, "my_other": 1, "seconds": 1.5}
    }


NAMES = st.sampled_from(
    ["Train-accuracy", "Validation-accuracy", "Train-cross-entropy", "Time cost", "Speed", "Sent", "Staleness"]
)


@given(NAMES, st.floats(allow_nan=False), st.integers(0, 10**9 - 1))
@example("Time cost", 0.0625, 3)  # half-way between two values of three decimals
def test_written_values_are_read_back(name: str, value: float, epoch: int) -> None:
    header, _, text = record.value(epoch, name, value).partition("] ")
    (pair,) = record.pairs(text.encode())
    assert header == f"Epoch[{epoch}"
    assert pair.key == record.key(name)
    half_a_decimal = 0.0005 if name == "Time cost" else 5e-7
    rounding = 1e-13  # of a difference of two numbers up to 100
    assert math.isclose(pair.value, value, rel_tol=1e-8, abs_tol=half_a_decimal + rounding) or pair.value == value


@given(st.dictionaries(st.sampled_from(["accuracy", "top_k_accuracy_5", "cross-entropy"]), st.floats(0, 1)))
def test_a_batch_line_is_read_back(metrics: dict[str, float]) -> None:
    pairs = record.pairs(record.batch(1, 20, 99.5, metrics).partition("Batch")[2].encode(), "train")
    assert [pair.key for pair in pairs] == ["speed", *(record.key(name, "train") for name in metrics)]
    assert [pair.value for pair in pairs[1:]] == pytest.approx(list(metrics.values()), abs=5e-7)


# ---- MXNet's own reader ---------------------------------------------------------------------------------------------


def as_mxnet_reads(lines: list[str], metric: str = "accuracy") -> dict[int, list[float]]:
    """{epoch: [train, validation, time]} by the patterns of MXNet's tools/parse_log.py: means over workers."""
    names = (f"Train-{metric}", f"Validation-{metric}", "Time")
    patterns = [re.compile(rf".*Epoch\[(\d+)\] {name}.*=([.\d]+)") for name in names]
    sums: dict[int, list[list[float]]] = {}
    for line in lines:
        matches = [(place, found) for place, pattern in enumerate(patterns) if (found := pattern.match(line))]
        if matches:
            place, found = matches[0]
            sums.setdefault(int(found[1]), [[], [], []])[place].append(float(found[2]))
    return {epoch: [sum(values) / len(values) for values in three] for epoch, three in sums.items()}


def test_mxnets_own_reader_reads_our_lines() -> None:
    lines = []
    for worker in range(2):
        said = [
            f"2026-11-20 12:00:00,123 Node[{worker}] {line}"
            for epoch in range(3)
            for line in (
                record.batch(epoch, 20, 1000, {"accuracy": 0.1}),
                record.value(epoch, "Train-accuracy", 0.25 + epoch / 10 + worker / 100),
                record.value(epoch, "Train-top_k_accuracy_5", 0.9),
                record.value(epoch, "Time cost", 12.5 + worker),
                record.value(epoch, "Validation-accuracy", 0.5),
                record.value(epoch, "Speed", 1733.12),
                record.value(epoch, "Memory", 512.3),
                record.value(epoch, "Sent", 99),
                record.usage(epoch, dict.fromkeys(record.USAGE, 0.25)),
            )
        ]
        lines += [record.plan(0, 2, 391), *said]
    read = as_mxnet_reads(lines)
    assert list(read) == [0, 1, 2]
    assert read[2] == pytest.approx([0.455, 0.5, 13.0])


def test_the_names_of_time_categories_are_stable() -> None:
    """Logs of every version are read by them."""
    assert record.COMMUNICATION == ("bound", "compute", "own-host", "wire", "server", "straggler")
    line = record.communication(3, {"bound": 0.5, "own-host": 1.25, "wire": 0.0})
    assert line.startswith("Epoch[3] Communication: bound=0.5")
    found = {pair.key: pair.value for pair in record.pairs(line.encode())}
    assert found == {"bound": 0.5, "own_host": 1.25, "wire": 0.0}


def test_the_names_of_usage_are_stable() -> None:
    assert record.USAGE == ("cpu", "host-cpu", "memory", "host-memory", "gpu", "gpu-memory")
    line = record.usage(3, {"cpu": 1.83, "host-cpu": 0.95, "memory": 512.0, "gpu-memory": 8012.0})
    assert line == "Epoch[3] Usage: cpu=1.830 host-cpu=0.950 memory=512.0 gpu-memory=8012.0"
    found = {pair.key: pair.value for pair in record.pairs(line.encode())}
    assert found == {"usage_cpu": 1.83, "usage_host_cpu": 0.95, "usage_memory": 512, "usage_gpu_memory": 8012}
    everything = record.pairs(record.usage(0, dict.fromkeys(record.USAGE, 1.0)).encode())
    assert tuple(pair.key for pair in everything) == record.USAGE_KEYS


def test_a_logger_writes_to_stderr_or_a_given_stream(capsys: pytest.CaptureFixture) -> None:
    stream = io.StringIO()
    record.logger(7).info("to stderr")
    record.logger(7, stream).info("to the stream")
    assert capsys.readouterr().err.endswith(" Node[7] to stderr\n")
    assert stream.getvalue().endswith(" Node[7] to the stream\n")


def test_only_a_value_at_the_very_end_may_be_cut_off() -> None:
    assert [pair.at_end for pair in record.pairs(b"a=1 b=2")] == [False, True]
    assert [pair.at_end for pair in record.pairs(b"a=1 b=2 ")] == [False, False]


def test_sums_over_parts_add_up_and_metrics_have_mxnets_names():
    total = Sums(4, 1, 3, 8.0) + Sums(6, 4, 4, 2.0)
    assert total == Sums(10, 5, 7, 10.0)
    assert Sums.of(total.values()) == total
    sums = Sums(10, 5, 7, 10.0)
    assert sums.metrics() == {"accuracy": 0.5, "cross-entropy": 1.0}
    assert list(sums.metrics(top_k=5)) == ["accuracy", "top_k_accuracy_5", "cross-entropy"]
    assert sums.metrics(top_k=5)["top_k_accuracy_5"] == 0.7
    assert math.isnan(Sums().metrics()["accuracy"])
