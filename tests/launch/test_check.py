"""What `--check` prints, as Markdown and for a terminal."""

import re

import pytest

from launch.job.host import Host
from launch.preflight import Problem, problems, request
from launch.preflight.table import Check, lines
from tests.launch.test_preflight import HOST, job  # noqa: F401  a fixture
from tests.launch.test_probe import look

HOSTS = (Host("node01", "10.0.0.1", interface="eth0"), Host("node02", "10.0.0.2", interface="ib0"), Host("node|3"))
FACTS = {
    "python": "3.11.2",
    "cores": 8,
    "memory": 64000,
    "gpus": [{"name": "NVIDIA A40"}] * 2,
    "skew": -0.25,
    "disk": {"/data": 9000, "/tmp": 5},
    "open_files": [1024, 4096],
    "inspection": {"version": "3.10.1", "packages": {"dmltrain": "0.1.0", "torch": "2.9.1", "mxnet": None}},
}
BARE = {"cores": 4, "memory": 2000, "gpus": [], "skew": 0.0, "open_files": [-1, -1], "inspection": {"error": "none"}}
REACHED = {
    "node01": {"node02": {"ms": 0.1234}, "node|3": {"error": "timed out"}},
    "node02": {"node01": {"ms": 12.0}, "node|3": {"error": "refused"}},
}
PROBLEMS = (
    Problem("", "versions differ", "install the same version on all hosts"),
    Problem("node|3", "no sshd\nhere", "", 125),
)
THROUGHPUT = {
    "node01": {"node02": {"speed": 941_300_000}},
    "node02": {"node01": {"speed": 93_700_000}},
    "node|3": {"node01": {"error": "timed out"}},
}
CHECK = Check(HOSTS, {"node01": FACTS, "node02": BARE}, REACHED, PROBLEMS, THROUGHPUT)

MARKDOWN = """\
## Hosts

|   # | host    | address  | NIC  | Python | dmltrain | torch | cores |   memory | GPUs           | disk free | open files |    clock |
| --: | ------- | -------- | ---- | ------ | -------- | ----- | ----: | -------: | -------------- | --------: | ---------: | -------: |
|   1 | node01  | 10.0.0.1 | eth0 | 3.10.1 | 0.1.0    | 2.9.1 |     8 |   62 GiB | 2 x NVIDIA A40 |  9000 MiB |       1024 | -0.250 s |
|   2 | node02  | 10.0.0.2 | ib0  | -      | -        | -     |     4 | 2000 MiB | none           |         - |  unlimited | +0.000 s |
|   3 | node\\|3 | -        | -    | -      | -        | -     |     - |        - | -              |         - |          - |        - |

## Round trips between the hosts' addresses, in ms

|   # | from    |  to 1 | to 2 |      to 3 |
| --: | ------- | ----: | ---: | --------: |
|   1 | node01  |     . | 0.12 | timed out |
|   2 | node02  | 12.00 |    . |   refused |
|   3 | node\\|3 |     - |    - |         . |

## TCP throughput between the hosts, both directions at once, in Mbit/s (* the slowest)

|   # | from    |      to 1 | to 2 | to 3 |
| --: | ------- | --------: | ---: | ---: |
|   1 | node01  |         . |  941 |    - |
|   2 | node02  |    93.7 * |    . |    - |
|   3 | node\\|3 | timed out |    - |    . |

- error: node|3: no sshd
  here
- warning: versions differ
  fix: install the same version on all hosts

3 hosts: 1 error, 1 warning; a job cannot start"""  # noqa: E501


def shown(check: Check, width: int) -> list[str]:
    """What is seen of it on a terminal."""
    return [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines(check, width)]


def test_markdown():
    assert "\n".join(lines(CHECK)) == MARKDOWN


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_lost_on_a_narrow_terminal(width):
    text = shown(CHECK, width)
    titles = [line for line in lines(CHECK) if line.startswith("## ")]
    assert max(map(len, text)) <= max(width, *(len(title) - len("## ") for title in titles))
    cells = "node01 10.0.0.1 eth0 3.10.1 0.1.0 2.9.1 8 62 9000 1024 unlimited -0.250 0.12 12.00 refused"
    assert {*cells.split()} - {*" ".join(text).split()} == set()
    assert "…" not in " ".join(text)
    assert text[-1] == "3 hosts: 1 error, 1 warning; a job cannot start"
    if width == 200:
        first, *others = [line for line in text if "node01" in line]
        assert len(others) == 2, "one for each table"
        assert all(cell in first for cell in ("10.0.0.1", "2.9.1", "-0.250 s"))


def test_the_exit_code_is_2_when_a_job_could_not_start():
    assert CHECK.exit_code == 2
    fine = Check(HOSTS[:2], CHECK.facts, {}, PROBLEMS[:1])
    assert fine.exit_code == 0
    assert lines(fine)[-1] == "2 hosts: 0 errors, 1 warning; a job can start"
    assert not any("Round trips" in line for line in lines(fine))


def test_a_real_probe_fills_the_row(job):  # noqa: F811
    asked = request(job, HOST)
    facts = look(**asked)
    check = Check([HOST], {HOST.name: facts}, {}, problems(HOST, facts, asked))
    row = next(line for line in lines(check) if HOST.name in line)
    for cell in (facts["inspection"]["version"], str(facts["cores"]), str(facts["open_files"][0])):
        assert f" {cell} |" in row
