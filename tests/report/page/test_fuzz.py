"""Files that another program may have written: usage.csv and results.json, read and shown."""

import json

import pytest

from dmltrain.report.page import experiment, samples
from dmltrain.report.page.chart import Curve, Lines
from dmltrain.report.page.pack import Pool
from dmltrain.report.page.sections import experiments
from dmltrain.report.page.sections.section import Context
from dmltrain.report.page.source import Sources
from tests.fuzzing import Fuzzed, parts, survive
from tests.report.page import written

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
    return json.dumps(Lines("a", "a", "a", "a", curves).json(Pool(), 8))


def show_results(content: bytes) -> object:
    """The section of an experiment."""
    found = experiment.parse("folder", content)
    return experiments.section(Context(Sources(experiments=(found,))))


SAMPLES = Fuzzed(show_samples, lambda: [CSV], (), (b'"', b",", b"\r", b"\0", b"nan", b"inf", b"1e999", b"-1", b"\n"))
EXPERIMENT = Fuzzed(
    show_results,
    lambda: [json.dumps(written.RESULTS).encode(), json.dumps(written.RESULTS, indent=1).encode()],
    (ValueError, RecursionError),
    (b"null", b"[]", b"{}", b"[" * 100, b"1e999", b"-1", b"../", b'"..", ', b"NaN", b"true", b"<b>"),
)


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("name", ["SAMPLES", "EXPERIMENT"])
def test_mutated_files_can_be_shown(name: str, part: int) -> None:
    survive(f"tests.report.page.test_fuzz:{name}", part)
