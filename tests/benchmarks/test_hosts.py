"""benchmarks/hosts.py measures real jobs on the test bed, judges their results, and leaves nothing behind."""

import re
import secrets

import numpy as np
import psutil
import pytest

from tests.benchmarks.as_a_user import benchmark_module, figures, run
from tests.cluster.command import namespaces

pytest.importorskip("torch", reason="the benchmark's workers need torch")
pytestmark = pytest.mark.alone

MARK = secrets.token_hex(8)
TINY = "--hosts 3 --workers-per-host 2 --megabytes 1.2 --repeats 1 --steps 2 --iperf-seconds 1"


@pytest.fixture(scope="module")
def result() -> dict:
    lacking = benchmark_module("contest.bed").missing()
    if lacking:
        pytest.skip(f"no five-host benchmark: it needs {lacking}")
    return figures(f"hosts.py --rate 100mbit --systems dmltrain {TINY}", HOSTS_TEST_MARK=MARK, how=run)


def test_a_step_and_every_link_are_held_against_the_bound_at_the_goodput_measured_beside_them(result: dict):
    assert 80e6 / 8 < result["goodput"] < 100e6 / 8
    bound = 2 * 2 * result["workload"]["bytes"] / (3 * result["goodput"])  # 2 (n - 1) V / (n B)
    assert result["bound_seconds"] == pytest.approx(bound)
    (row,) = result["contests"]
    assert (row["system"], row["gc_type"], row["ratio_to_mxnet"]) == ("dmltrain", "none", None)
    # the token buckets let a part of so few bytes pass at once, hence no comparison with the bound itself
    assert row["share_of_bound"] == pytest.approx(bound / row["seconds"]["median"])
    assert row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
    least = 2 * 2 * result["workload"]["bytes"] / 3
    assert least < row["mean_link_bytes"]["median"] < 1.1 * least  # headers of frames and packets
    assert row["mean_link_bytes"]["median"] <= row["busiest_link_bytes"]["median"]
    table = benchmark_module("tables.hosts").table(result)
    assert "3 hosts, each 2 workers and a server, links of 100mbit" in table
    assert "bound 2(n-1)V/(nB)" in table and "\ndmltrain dist_sync " in table


def test_nothing_is_left(result: dict):
    marked = [
        process.info
        for process in psutil.process_iter(["environ", "cmdline"])
        if (process.info["environ"] or {}).get("HOSTS_TEST_MARK") == MARK
    ]
    assert not marked
    beds = {int(found[1]) for found in map(re.compile(r"testbed-benchmark(\d+)-").match, namespaces()) if found}
    assert not [pid for pid in beds if not psutil.pid_exists(pid)]  # those of benchmarks that run are theirs


def test_doubtful_times_are_called_so():
    report = benchmark_module("tables.hosts")
    quiet = {"label": "x", "other_cores": 0.05, "idle_cores": 0.0}
    steady = [[100.0, 102.0], [101.0, 101.0]]
    assert report.doubts({"goodput_of_each_turn": steady, "contests": [quiet]}) == []
    for turns, contest, said in (
        (steady, quiet | {"other_cores": 0.5}, "others used 0.50"),
        (steady, quiet | {"idle_cores": 1}, "outside its turns"),
        ([[100.0], [90.0]], quiet, "goodput"),
    ):
        assert said in report.doubts({"goodput_of_each_turn": turns, "contests": [contest]})[0]


class TwoBit:
    """Error feedback with three levels, as the worker's and the server's codec make it."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self.residual = threshold, 0.0

    def __call__(self, value: np.ndarray) -> np.ndarray:
        wanted = value + self.residual
        sent = self.threshold * (wanted >= self.threshold) - self.threshold * (wanted <= -self.threshold)
        self.residual = wanted - sent
        return sent.astype(np.float32)


def judged(codec: str, results, workers: int = 3) -> None:
    """What the judge of worker 1 says of `results(sums, pushes)` in ten steps."""
    workload, lossy = benchmark_module("contest.workload"), benchmark_module("contest.lossy")
    shapes = [(500,), (7, 9)]
    sources = [workload.patterns(shapes, rank) for rank in range(workers)]
    gradients = [[array.copy() for array in source] for source in sources]
    judge = lossy.Cumulative(codec, shapes, 1, workers)
    for step in range(10):
        for rank in range(workers):
            workload.write(gradients[rank], sources[rank], rank, step)
        judge.advance(step)
        judge.check_marked([results(key, [gradient[key] for gradient in gradients]) for key in range(len(shapes))])
    judge.check_all([], sources[1])


def test_a_two_bit_codec_with_error_feedback_passes_and_one_that_forgets_does_not():
    workload, lossy = benchmark_module("contest.workload"), benchmark_module("contest.lossy")
    threshold = lossy.parameters("2bit-threshold", 3)["threshold"]
    workers = [[TwoBit(threshold) for _ in range(3)] for _ in range(2)]
    servers = [TwoBit(3 * threshold), TwoBit(3 * threshold)]

    def feedback(key: int, pushes: list[np.ndarray]) -> np.ndarray:
        return servers[key](sum(code(push) for code, push in zip(workers[key], pushes, strict=True)))

    judged("2bit-threshold", feedback)
    with pytest.raises(workload.WrongResult, match="key 0, 2bit-threshold: after 10 steps"):
        judged("2bit-threshold", lambda key, pushes: TwoBit(threshold)(sum(pushes)))


def test_rounding_passes_and_a_missing_worker_does_not():
    wrong = benchmark_module("contest.workload").WrongResult
    for codec in ("bf16", "fp16", "int8"):
        judged(codec, lambda key, pushes: sum(push.astype(np.float16) for push in pushes).astype(np.float32))
        with pytest.raises(wrong, match=f"key 0, {codec}"):
            judged(codec, lambda key, pushes: sum(pushes[1:]))
    judged("topk", lambda key, pushes: np.where(np.arange(pushes[0].size).reshape(pushes[0].shape) % 2, sum(pushes), 0))
    with pytest.raises(wrong, match="key 0, topk"):
        judged("topk", lambda key, pushes: -sum(pushes))
    with pytest.raises(wrong, match="all results of 10 steps are zero"):
        judged("topk", lambda key, pushes: 0 * pushes[0])
