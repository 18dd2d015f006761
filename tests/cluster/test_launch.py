"""Starting jobs on real hosts: what reaches the processes, how many logins it takes, and how soon they run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.launching import WAYS, Front, way
from tests.cluster.testbed import Testbed

WORDS = ["", " ", "two words", " spaces around ", "it's", '"quoted"', "'\"", "$HOME", "${HOME}", "$(id)", "`id`", "$",
         ";", "a;b", "; exit 3", "line\nbreak", "\n", "\r\n", "\ttab", "\\", "\\n", "*", "?", "~", "#", "&", "&&", "|",
         ">x", "(", "{a,b}", "!x", "%s", "=", "a=b", "-n", "--", "--help", "-", "grün ñ 漢字 🙂", "\udcff\udc80",
         "x" * 100_000]  # fmt: skip
VALUES = [word for word in WORDS if word != "x" * 100_000]
PROGRAM = """
import json, os, sys
place = f"{os.environ['DMLC_ROLE']}-{os.environ['DMLC_TASK_ID']}"
values = {name: value for name, value in os.environ.items() if name.startswith(("VALUE_", "MXNET_VALUE_"))}
with open(place + ".json", "w") as file:
    json.dump({"argv": sys.argv, "values": values, "folder": os.getcwd(), "host": os.uname().nodename}, file)
"""


@pytest.mark.parametrize("name", WAYS)
def test_arguments_and_environment_arrive_unchanged(testbed: Testbed, tmp_path: Path, name: str):
    folder = tmp_path / "it's $HOME; a \"folder\" ñ"
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
