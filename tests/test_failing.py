"""A failed test shows the machine's load, how long it took, and the last lines of its processes."""

import pytest

from tests.conftest import ROOT

pytest_plugins = ["pytester"]
FAILS = """
def test_it(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job/worker-0.log").write_text("".join(f"line {number}\\n" for number in range(50)))
    (tmp_path / "err").write_text("worker 1 exited with code 7\\n")
    assert not FAIL
"""


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_shown(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, fails: bool):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(FAILS.replace("FAIL", str(fails)))
    shown = pytester.runpytest_subprocess("-p", "tests.failing", "-p", "no:cacheprovider").stdout.str()
    for words in ("call 0.", "; load ", "-- job/worker-0.log\nline 44\n", "line 49\n", "worker 1 exited with code 7"):
        assert (words in shown) == fails, shown
    assert "line 43" not in shown
