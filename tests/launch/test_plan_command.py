"""--plan: other programs learn from it which process runs where, and how to reach the host."""

import json
import subprocess
import sys

from launch.command_line.table import OPTIONS


def launch(*words, cwd):
    return subprocess.run([sys.executable, "-m", "launch.cli", *words], cwd=cwd, capture_output=True, text=True)


def test_where_each_process_runs(tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1 hostname=10.0.0.2 user=me port=2222\n")
    done = launch("--plan", "-n", "2", "-s", "2", "-H", "hosts", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [(row["role"], row["rank"], row["host"]) for row in rows] == [
        ("scheduler", 0, "a"),
        ("server", 0, "a"),
        ("server", 1, "b"),
        ("worker", 0, "a"),
        ("worker", 1, "b"),
    ]
    first, *_, last = rows
    assert (first["hostname"], first["user"], first["port"]) == ("a", "", 0)
    assert (last["hostname"], last["user"], last["port"]) == ("10.0.0.2", "me", 2222)
    assert not (tmp_path / "logs").exists()


def test_a_mistake_in_the_hosts_file_is_an_error(tmp_path):
    (tmp_path / "hosts").write_text("a slots=one\n")
    done = launch("--plan", "-n", "1", "-H", "hosts", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "hosts:1" in done.stderr and done.stdout == ""


def test_no_two_options_have_one_name():
    names = [name for option in OPTIONS for name in option.names]
    assert len(names) == len(set(names))
