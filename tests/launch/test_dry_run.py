"""--dry-run: the commands are those that would run, and none of them tells a secret. --plan: what programs learn."""

import json
import subprocess

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.cli import launch
from dmltrain_launch.commands import dry_run
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job, Setting
from dmltrain_launch.job.options import Options
from dmltrain_launch.secret import is_secret, redact, redact_all, secrets

NASTY = "a b'c\"d $HOME; `x` \\ \n é *"


def printed(job: Job, hosts: list[Host], launcher: str = "ssh") -> list[str]:
    return dry_run.lines(job, hosts, Options(launcher=launcher), python="/usr/bin/python3")


def commands(text: list[str]) -> dict[str, str]:
    """The shell's command of each process."""
    found, name = {}, ""
    for line in "\n".join(text).split("\n"):
        if line.startswith("  ") and line[2:3].isalpha():
            name = line.strip()
            found[name] = ""
        elif name and (line.startswith(" ") or found[name].count("'") % 2):  # the latter inside a quoted newline
            found[name] += line + "\n"
    return found


def test_what_runs_where(tmp_path):
    hosts = [Host("h1"), Host("h2", hostname="10.0.0.2", user="me", port=2222, python="/opt/py", workdir="/data/me")]
    text = printed(Job("fit", "mark", ("train.py", "--lr", "0.1"), 3, 2, str(tmp_path)), hosts)
    assert text[0] == "dry run of job fit: 6 processes on 2 hosts by ssh; nothing is started"
    heads = [line for line in text if line and not line.startswith("    ")]
    assert heads[1:] == [
        *(f"h1: 4 processes in {tmp_path}", "  scheduler 0", "  server 0", "  worker 0", "  worker 1"),
        *("h2 (me@10.0.0.2:2222): 2 processes in /data/me", "  server 1", "  worker 2"),
    ]
    assert any(line.endswith("/usr/bin/python3 train.py --lr 0.1") for line in text)
    assert any(line.endswith("/opt/py train.py --lr 0.1") for line in text)
    body = "\n".join(text)
    assert "'DMLC_PS_ROOT_PORT=<chosen by the agent>'" in body and "'MASTER_PORT=<chosen by the agent>'" in body
    assert "'DMLC_PS_ROOT_URI=<address of h1>'" in body and "'DMLC_NODE_HOST=<address of h2>'" in body
    assert "'OMP_NUM_THREADS=<cores of h2 / " in body and "mark" not in body
    assert max(map(len, text)) <= dry_run.WIDTH + 8 + len(str(tmp_path))


def test_known_values_are_printed():
    job = Job("fit", "m", ("hostname",), 2, 1, "/w", (Setting("OMP_NUM_THREADS", "3", "worker"),), port=9000)
    body = "\n".join(printed(job, [Host("localhost", "127.0.0.1", cores=8)]))
    assert "DMLC_PS_ROOT_PORT=9000" in body and "DMLC_NODE_HOST=127.0.0.1" in body and "OMP_NUM_THREADS=3" in body
    job = Job("fit", "m", ("hostname",), 2, 1, "/w")
    body = "\n".join(printed(job, [Host("localhost", "127.0.0.1", cores=8)], "local"))
    assert body.count("OMP_NUM_THREADS=4") == 2 and "/usr/bin/python3" not in body


def test_a_shell_runs_what_is_printed(tmp_path):
    """Copied into a shell, a command runs the program with these very arguments and variables, and in this memory."""
    folder = tmp_path / "it's a $place"
    folder.mkdir()
    found = "sys.argv[1:], os.getcwd(), os.environ['V'], os.environ['RANK'], getrlimit(RLIMIT_DATA)[0]"
    argv = ("python3", "-c", f"import json, os, sys; from resource import *; print(json.dumps([{found}]))", NASTY, "")
    for shell, memory in (("bash", {}), ("sh", {"worker": 512})):
        job = Job("fit", "m", argv, 2, 0, str(folder), (Setting("V", NASTY),), memory=memory)
        found = commands(printed(job, [Host("localhost", "127.0.0.1")]))
        assert list(found) == ["worker 0", "worker 1"]
        assert ("ulimit" in found["worker 0"]) == bool(memory)
        for rank, command in enumerate(found.values()):
            *said, most = json.loads(subprocess.check_output([shell, "-c", command]))
            assert said == [[NASTY, ""], str(folder), NASTY, str(rank)]
            assert not memory or most == 512 << 20


def test_no_secret_is_printed():
    settings = (
        *(Setting("MY_PLACE", "sesame", secret=True), Setting("HF_TOKEN", "hf_it's"), Setting("db_password", "p w\n2")),
        *(Setting("MAX_TOKENS", "4096"), Setting("TOKENIZERS_PARALLELISM", "true"), Setting("EMPTY_KEY", "")),
    )
    argv = ("train.py", "wandbs", "--auth=hf_it's", "--where", "sesame/street", "--url=http://me:p w\n2@h")
    host = Host("h1", environment=(("WANDB_API_KEY", "wandbs"),))
    text = printed(Job("sesame", "m", (*argv, "--n", "4096"), 1, 1, "/w", settings), [host])
    body = "\n".join(text)
    for value in ("sesame", "wandbs", "hf_it", "p w", "w\n2"):
        assert value not in body
    for shown in ("'HF_TOKEN=***'", "'MY_PLACE=***'", "'db_password=***'", "'--auth=***' --where '***/street'"):
        assert shown in body
    assert "'--url=http://me:***@h'" in body
    assert "'MAX_TOKENS=***'" in body and "--n 4096" in body, "a number that only sounds secret is left elsewhere"
    assert "TOKENIZERS_PARALLELISM=true" in body and "EMPTY_KEY=" in body


@pytest.mark.parametrize(
    "names, secret",
    [
        ("AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID WANDB_API_KEY token GIT_CREDENTIALS SSH_PASSPHRASE", True),
        ("MYSQL_PWD KEYBOARD DMLTRAIN_KEY_FILE TOKENIZERS_PARALLELISM PWD HOME", False),
    ],
)
def test_names_that_look_secret(names, secret):
    for name in names.split():
        assert is_secret(name) is secret and is_secret(name, {name}), name


def test_redacting():
    assert redact("abcab", ("ab", "abc")) == "******", "the longer one first"
    assert redact("a.b axb", ("a.b",)) == "*** axb"
    assert redact("text", ()) == "text"
    found = redact_all({"argv": ["x", ("secret",)], "secret": 5, "n": None}, ("secret",))
    assert found == {"argv": ["x", ("***",)], "***": 5, "n": None}


def test_which_values_are_secret():
    pairs = [("A_KEY", "long enough"), ("B_KEY", "abc"), ("C_KEY", "1e-5"), ("D", "1"), ("E_TOKEN", ""), ("F", "x")]
    assert secrets(pairs) == ("long enough",)
    assert secrets(pairs, {"B_KEY", "D"}) == ("1", "abc", "long enough"), "a named one whatever it is"


# -- --plan ------------------------------------------------------------------------------------------------------------


def test_where_each_process_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1 hostname=10.0.0.2 user=me port=2222\n")
    assert launch(["--plan", "-n", "2", "-s", "2", "-H", "hosts", "train.py"]) == 0
    said = capsys.readouterr()
    rows = json.loads(said.out)
    placed = [f"{row['role']}-{row['rank']} {row['host']}" for row in rows]
    assert placed == ["scheduler-0 a", "server-0 a", "server-1 b", "worker-0 a", "worker-1 b"] and said.err == ""
    first, *_, last = rows
    assert (first["hostname"], first["user"], first["port"]) == ("a", "", 0)
    assert (last["hostname"], last["user"], last["port"]) == ("10.0.0.2", "me", 2222)
    assert not (tmp_path / "logs").exists()
    (tmp_path / "hosts").write_text("a slots=one\n")
    with pytest.raises(LaunchError, match="hosts:1") as wrong:
        launch(["--plan", "-n", "1", "-H", "hosts", "train.py"])
    assert wrong.value.code == 2 and capsys.readouterr().out == ""
