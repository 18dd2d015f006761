"""Starting jobs on real hosts: what reaches the processes, how many logins it takes, and how soon they run."""

import os
import time
from pathlib import Path

import pytest

from tests.cluster.launching import Front, first_of, way
from tests.cluster.testbed import Testbed

LONG = "x" * 100_000
WORDS = [
    *("", " ", "two words", " spaces around ", "it's", '"quoted"', "'\"", "\\", "\\n"),
    *("line\nbreak", "\n", "\r\n", "\ttab", "$HOME", "${HOME}", "$(id)", "`id`", "$"),
    *(";", "a;b", "; exit 3", "&", "&&", "|", ">x", "(", "#", "*", "?", "~", "{a,b}", "!x"),
    *("%s", "=", "a=b", "-n", "--", "--help", "-", "grün ñ 漢字 🙂", "\udcff\udc80", LONG),
]
VALUES = [word for word in WORDS if word != LONG]
PROGRAM = """
import json, os, sys
place = f"{os.environ['DMLC_ROLE']}-{os.environ['DMLC_TASK_ID']}"
values = {name: value for name, value in os.environ.items() if name.startswith(("VALUE_", "MXNET_VALUE_"))}
with open(place + ".json", "w") as file:
    json.dump({"argv": sys.argv, "values": values, "folder": os.getcwd(), "host": os.uname().nodename}, file)
"""


@pytest.mark.parametrize("name", first_of("local", "ssh", "open-mpi", "ssh-system", "mpich", in_test=3))
def test_arguments_and_environment_arrive_unchanged(testbed: Testbed, tmp_path: Path, name: str):
    folder = tmp_path / 'it\'s $HOME; a "folder" ñ'
    folder.mkdir()
    front = Front(testbed, folder)
    script = front.script(PROGRAM, "a program.py").name
    given = {f"VALUE_{number}": value for number, value in enumerate(VALUES)}
    forwarded = {f"MXNET_{name}": value for name, value in given.items()}
    settings = [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
    done = front.run(*way(name, "h1,h2"), "-n", 2, "-s", 1, *settings, script, *WORDS, env=forwarded)
    assert done.code == 0, done
    written = front.written()
    assert sorted(written) == ["scheduler-0", "server-0", "worker-0", "worker-1"]
    for place, found in written.items():
        assert found["argv"][1:] == WORDS, place
        assert found["values"] == given | forwarded, place
        assert found["folder"] == os.path.realpath(folder)
    assert {found["host"] for found in written.values()} == ({"login"} if name == "local" else {"h1", "h2"})
    front.wait_idle()


@pytest.mark.parametrize("name", first_of("ssh", "open-mpi"))
def test_hosts_that_are_namespaces_of_one_machine_share_its_cores(front: Front, name: str):
    front.environment.pop("OMP_NUM_THREADS", None)  # it would be passed on
    done = front.run(*way(name, "h[1-5]"), "-n", 5, "-s", 0, "sh", "-c", "env | grep ^OMP_NUM_THREADS=")
    assert done.code == 0, done
    said = [path.read_text().strip() for path in (front.folder / "logs").glob("worker-*.log")]
    assert said == [f"OMP_NUM_THREADS={max(1, len(os.sched_getaffinity(0)) // 5)}"] * 5


@pytest.mark.parametrize("name", first_of("ssh", "ssh-system", "open-mpi"))
def test_sixty_processes_on_one_host_take_one_login(testbed: Testbed, front: Front, name: str):
    before = testbed.logins("h1")
    done = front.run(*way(name, "h1"), "-n", 30, "-s", 29, "sh", "-c", "echo $DMLC_ROLE:$DMLC_TASK_ID")
    assert done.code == 0, done
    said = sorted(path.read_text().strip() for path in (front.folder / "logs").glob("*.log"))
    assert said == sorted(
        ["scheduler:0"]
        + [f"{role}:{rank}" for role, count in (("server", 29), ("worker", 30)) for rank in range(count)]
    )
    assert testbed.logins("h1") - before == 1


@pytest.mark.alone
@pytest.mark.parametrize("name", first_of("ssh", "ssh-system", "open-mpi", "mpich"))
def test_64_processes_on_five_hosts_start_within_five_seconds(front: Front, name: str):
    """From the launcher's own start to the last process's first instruction, in the best of a few attempts: the
    machine may be busy with something else."""
    program = ["sh", "-c", 'date +%s.%N > "$0/$DMLC_ROLE-$DMLC_TASK_ID"']
    took = []
    for attempt in range(5):
        folder = front.folder / f"started-{attempt}"
        folder.mkdir()
        began = time.time()
        done = front.run(*way(name, "h[1-5]"), "-n", 32, "-s", 31, *program, folder, logs=f"logs-{attempt}")
        assert done.code == 0, done
        times = [float(path.read_text()) for path in folder.iterdir()]
        assert len(times) == 64
        took.append(max(times) - began)
        if min(took) < 5:
            return
    pytest.fail(f"64 processes took {took} s to start")
