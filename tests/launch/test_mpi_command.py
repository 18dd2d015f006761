"""mpirun's command line and the choice of hosts, without mpirun."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.bridges.bridge import ENGINES_OWN
from dmltrain_launch.channels.bridges.engine import OUTPUT_BYTES, Started, bridge_command, choice
from dmltrain_launch.channels.bridges.runs import addresses
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.clusters.mpi import hosts as mpi
from dmltrain_launch.clusters.mpi.hosts import MPICH, OPEN_MPI, check, command, kind
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts.allocation import allocation
from tests.scripts import shell_script
from tests.waiting import SECONDS, wait_for

HOSTS = [Host("node10"), Host("gpu7", hostname="10.0.0.7"), Host("node02")]  # ssh knows the second by another name


def argv(kind: str, hosts: list[Host], *arguments: str) -> list[str]:
    """With "bridge 3" for the command of bridge 3."""
    words = command("mpirun", kind, arguments, hosts)
    short = {bridge_command(choice(host, index))[2]: f"bridge {index}" for index, host in enumerate(hosts)}
    return [short.get(word, word) for word in words if word not in ("/bin/sh", "-c")]


def started(words: list[str], on_end=lambda code: None) -> Started:
    return Started(mpi.engine("mpirun", OPEN_MPI), words, "settings", on_end)


def test_open_mpi_runs_a_process_on_each_host_in_their_order():
    each = "-np 1 -host {} -wdir / -x DMLTRAIN_BRIDGE bridge {}"
    names = ("node10:1", "10.0.0.7:1", "node02:1")
    processes = " : ".join(each.format(name, index) for index, name in enumerate(names))
    expected = f"mpirun --mca a b --bind-to none --oversubscribe {processes}"
    assert " ".join(argv(OPEN_MPI, HOSTS, "--mca", "a", "b")) == expected


def test_mpich_runs_a_process_on_each_host_in_their_order():
    assert " ".join(argv(MPICH, HOSTS, "-iface", "eth1")) == (
        "mpirun -iface eth1 -genvlist DMLTRAIN_BRIDGE -hosts node10:1,10.0.0.7:1,node02:1 "
        "-np 1 -wdir / bridge 0 : -np 1 -wdir / bridge 1 : -np 1 -wdir / bridge 2"
    )


def test_the_python_of_a_host_may_have_any_name():
    text = bridge_command(choice(Host("a", python="/opt/my python/it's"), 3))[2]
    assert text.startswith("i=3; p='/opt/my python/it'\"'\"'s'; \"$p\" -I")
    assert "python3" not in text, "a Python that was asked for is not replaced by another"
    text = bridge_command(choice(Host("a"), 3))[2]
    assert text.startswith(f'i=3; p={sys.executable}; command -v "$p" >/dev/null 2>&1 || p=python3; "$p" -I')


BLOCK = "\n    Host a\n        User ann\n        Port 2222"


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (Host("a", user="ann", where="hosts:3"), ["hosts:3", "Host a", "User ann"]),
        (Host("a", user="ann", port=2222), ["no user and no port for a", "~/.ssh/config", BLOCK]),
        (Host("a", hostname="10.0.0.1", port=2222), ["Host 10.0.0.1", "Port 2222"]),
        (Host("fd00::1"), ["fd00::1", "IPv4"]),
        (Host("-oProxyCommand=x", where="hosts:3"), ["hosts:3: ", "'-oProxyCommand=x'"]),
        (Host("a,b"), ["a,b"]),
        (Host("a b"), ["a b"]),
    ],
)
def test_attributes_that_mpirun_does_not_support_are_refused_with_a_fix(host, words):
    with pytest.raises(LaunchError) as caught:
        check([Host("fine"), host])
    assert all(word in str(caught.value) for word in words)


def test_no_mpirun():
    with pytest.raises(LaunchError, match="no-such-mpirun is not installed") as caught:
        kind("no-such-mpirun")
    assert caught.value.code == 127


def program(path: Path, text: str) -> str:
    return str(shell_script(path, text))


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'mpirun (Open MPI) 4.1.6'", OPEN_MPI),
        ("echo 'mpirun.openmpi (OpenRTE) 4.1.4'", OPEN_MPI),
        ("echo 'mpirun (PRRTE) 3.0.2'", OPEN_MPI),
        ("echo 'HYDRA build details:'", MPICH),
        ("echo 'Intel(R) MPI Library for Linux* OS, Version 2021.9'", MPICH),
        ("printf '\\377 Open MPI'", OPEN_MPI),
        ("echo HYDRA >&2; exit 1", MPICH),
    ],
)
def test_the_mpi_is_recognized_by_its_version(tmp_path, script, expected):
    assert kind(program(tmp_path / "mpirun", script)) == expected


@pytest.mark.parametrize(("script", "said"), [("echo LAM 7.1", "'LAM 7.1'"), ("exit 0", "'nothing'")])
def test_an_mpirun_of_another_kind_or_that_says_nothing_of_its_version(tmp_path, script, said):
    with pytest.raises(LaunchError, match=f"{said}: expected Open MPI or MPICH"):
        kind(program(tmp_path / "mpirun", script))


def test_mpirun_reads_nothing_of_what_is_typed_for_the_launcher(tmp_path):
    name = program(tmp_path / "mpirun", '[ "$(readlink /proc/$$/fd/0)" = /dev/null ] && echo HYDRA')
    asks = f"from dmltrain_launch.clusters.mpi.hosts import kind; print(kind({name!r}))"
    root = Path(mpi.__file__).parents[2]
    asked = subprocess.run([sys.executable, "-c", asks], input=b"typed", capture_output=True, cwd=root)
    assert asked.stdout == b"MPICH\n"


def test_a_program_that_is_no_mpirun(tmp_path):
    path = tmp_path / "mpirun"
    path.write_bytes(b"\0")
    path.chmod(0o755)
    with pytest.raises(LaunchError, match="mpirun --version") as caught:
        kind(str(path))
    assert caught.value.code == 126


def test_an_agent_does_not_take_itself_for_a_process_of_mpirun():
    told = "OMPI_COMM_WORLD_RANK OMPI_MCA_ess PMIX_RANK PMI_FD PMI_RANK MPI_LOCALNRANKS HYDI_X"
    assert all(ENGINES_OWN.match(name) for name in [*told.split(), "MPIR_CVAR_CH3_INTERFACE_HOSTNAME"])
    assert not any(ENGINES_OWN.match(name) for name in ["PATH", "MPI_HOME", "MPICC", "PMIXED", "OMP_NUM_THREADS"])


# -- hosts -------------------------------------------------------------------------------------------------------------


def test_the_hosts_of_a_pbs_job_are_each_taken_once(tmp_path):
    (tmp_path / "nodes").write_text("n2\nn2\nn1\n")
    where = f"PBS_NODEFILE {tmp_path}/nodes"  # what errors about a host name
    assert allocation({"PBS_NODEFILE": f"{tmp_path}/nodes"}) == [Host("n2", where=where), Host("n1", where=where)]
    with pytest.raises(LaunchError, match="PBS_NODEFILE .*none: No such file"):
        allocation({"PBS_NODEFILE": str(tmp_path / "none")})


def test_a_slurm_job_is_asked_for_its_hosts(tmp_path, monkeypatch):
    program(tmp_path / "scontrol", 'echo "$1 $2 $3" | grep -qx "show hostnames n\\[1-2\\]" && echo n1 && echo n2')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    where = "SLURM_JOB_NODELIST"
    assert allocation({where: "n[1-2]"}) == [Host("n1", where=where), Host("n2", where=where)]
    assert allocation({}) == [], "outside of such a job"


def test_the_output_of_scontrol_is_in_the_error_and_that_it_is_missing(tmp_path, monkeypatch):
    with monkeypatch.context() as alone:
        alone.setenv("PATH", str(tmp_path))
        with pytest.raises(LaunchError, match="SLURM_JOB_NODELIST.*scontrol.*--hosts"):
            allocation({"SLURM_JOB_NODELIST": "n[1-2]"})
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for script, said in (("echo 'no such node' >&2; echo n1; exit 1", "'no such node'"), ("echo; exit 0", "''")):
        program(tmp_path / "scontrol", script)
        with pytest.raises(LaunchError, match=f"SLURM_JOB_NODELIST=n1: scontrol failed: {said}; use --hosts"):
            allocation({"SLURM_JOB_NODELIST": "n1"})


def test_some_hosts_of_an_allocation_or_this_machine_without_one(tmp_path, monkeypatch):
    (tmp_path / "nodes").write_text("n1\nn2\nn3\n")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert [host.name for host in mpi.hosts_of(replace(AllOptions(), exclude="n2"))] == ["n1", "n3"]
    monkeypatch.delenv("PBS_NODEFILE")
    assert [host.name for host in mpi.hosts_of(AllOptions())] == ["localhost"]
    with pytest.raises(LaunchError, match="--exclude"):
        mpi.hosts_of(replace(AllOptions(), exclude="a"))


def test_local_bridges_connect_over_loopback_and_remote_ones_get_every_other_address():
    assert addresses([Host("localhost"), Host("127.0.0.2")], "") == ["127.0.0.1"], "no other host can connect"
    told = addresses([Host("localhost"), Host("192.0.2.99")], "")
    assert not any(each.startswith(("127.", "fe80")) or each == "::1" for each in told)
    assert addresses([Host("192.0.2.99")], "10.1.2.3") == ["10.1.2.3"]


RACE = "[login:00184] plm:rsh: Warning: setpgid(191,191) failed in parent with errno=Permission denied(13)"


def test_what_an_mpirun_printed_is_passed_on_with_a_fix_for_root(tmp_path):
    def said(words: str) -> str:
        ended = started([program(tmp_path / "m", f"{words}; exit 1")])
        assert ended.fate(SECONDS) == "mpirun exited with 1"
        return ended.complaint()

    no_rulers_and_no_harmless_warnings = f"echo -----; echo; echo one; echo '{RACE}'; echo two >&2"
    assert said(no_rulers_and_no_harmless_warnings) == "mpirun exited with 1 and printed\none\ntwo"
    assert said("true") == "mpirun exited with 1 and printed nothing"
    assert said("printf 'no \\377text  \\n'") == "mpirun exited with 1 and printed\nno \ufffdtext"
    for words in ("running AS ROOT is refused", "an attempt to run as root.", "add the --allow-run-as-root option"):
        start, printed, fix = said(f"echo '{words}'").split("\n")
        assert (start, printed) == ("mpirun exited with 1 and printed", words)
        assert fix.startswith("With dmltrain-launch use --mpirun-args=--allow-run-as-root, or set ")


def test_the_end_of_an_mpirun_is_noticed_while_a_process_that_it_has_left_holds_its_output(tmp_path):
    codes: list[int] = []
    left = started([program(tmp_path / "m", "sleep 600 & echo $!; exit 3")], codes.append)
    assert left.fate() in ("", "mpirun exited with 3"), "it does not wait"
    assert left.fate(SECONDS) == "mpirun exited with 3"
    os.kill(int(left.output), signal.SIGKILL)
    wait_for(lambda: codes, "the report of the end")
    assert codes == [3]


def test_an_mpirun_has_a_session_of_its_own_and_no_input(tmp_path):
    before = set(threading.enumerate())
    waits = f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done"
    show = "ps -o sid= -p $$; readlink /proc/$$/fd/0; echo $$"
    ended = started(["/bin/sh", "-c", f"{waits}; {show}"])
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2 and all(thread.daemon for thread in threads), "the launcher may end before it"
    assert ended.fate() == "" and not ended.output
    (tmp_path / "go").touch()
    ended.fate(SECONDS)
    session, stdin, pid = ended.output.split()
    assert (session, stdin) == (pid, "/dev/null")


def test_the_settings_of_every_mpi_are_in_the_environment_but_the_users_own_count(tmp_path, monkeypatch):
    monkeypatch.setenv("PRTE_MCA_plm_ssh_no_tree_spawn", "0")
    script = f"tr '\\0' '\\n' < /proc/$$/environ > {tmp_path}/seen"
    started(["/bin/sh", "-c", script]).fate(SECONDS)
    lines = (tmp_path / "seen").read_text().splitlines()
    assert lines[0] == "DMLTRAIN_BRIDGE=settings", "MPICH 4.0 does not pass on the last variable"
    expected = "OMPI_MCA_plm_rsh_no_tree_spawn=1 OMPI_MCA_orte_keep_fqdn_hostnames=1 "
    expected += "PRTE_MCA_plm_ssh_no_tree_spawn=0 PRTE_MCA_prte_keep_fqdn_hostnames=1"
    assert {*expected.split()} <= {*lines}
    with pytest.raises(LaunchError, match="cannot start .*/none: No such file") as caught:
        started([str(tmp_path / "none")], print)
    assert caught.value.code == 126


def test_a_talkative_mpirun_is_remembered_in_part(tmp_path):
    ended = started([program(tmp_path / "m", "yes | head -c 10000000; echo last")])
    assert ended.fate(SECONDS) == "mpirun exited with 0"
    assert ended.output.splitlines() == ["y"] * 29 + ["last"]
    assert len(ended.output) < OUTPUT_BYTES


def test_an_mpirun_that_ignores_term_is_killed(tmp_path):
    stubborn = started([program(tmp_path / "m", "trap '' TERM; echo up; while :; do sleep 0.1; done")], print)
    while "up" not in stubborn.output and not stubborn.fate(0.01):
        pass
    stubborn.end()
    assert stubborn.fate(SECONDS) == "mpirun was killed by SIGKILL"


def test_an_mpirun_that_does_not_reach_a_host_is_killed_without_waiting(tmp_path):
    """It might wait for the host forever. SIGTERM first would cost the end of a job half a second or more."""
    waits = f"echo trying; echo $$ > {tmp_path}/pid; trap 'echo > {tmp_path}/term' TERM; while :; do sleep 0.1; done"
    says_what_it_is = "[ $1 = --version ] && { echo Open MPI; exit; }"
    options = replace(AllOptions(), mpirun=program(tmp_path / "m", f"{says_what_it_is}\n{waits}"), host_ip="127.0.0.1")
    cluster = mpi.Cluster(options, [Host("far")])
    with pytest.raises(LaunchError, match=r"far was not reached by mpirun within 3 s") as caught:
        cluster.connect(Host("far"), "mark", 3.0)
    assert str(caught.value).endswith("(--connect-timeout); mpirun printed\ntrying") and caught.value.code == 125
    written = tmp_path / "pid"
    pid = wait_for(lambda: written.exists() and written.read_text().strip(), "its pid")
    cluster.close()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of mpirun")
    assert not (tmp_path / "term").exists()
