"""srun's command line and the choice of nodes, without Slurm."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters import AllOptions
from dmltrain_launch.clusters.queue import Inside
from dmltrain_launch.clusters.slurm.hosts import REMOVED, Allocated, command, components_of, hosts_of
from dmltrain_launch.clusters.slurm.queue import sbatch
from dmltrain_launch.job.host import Host
from tests.scripts import shell_script

HOSTS = [Host("h7"), Host("h2", python="/opt/it's/python")]


def submitted(options: AllOptions) -> tuple[str, ...]:
    """The command line of sbatch."""
    return tuple(sbatch(Inside(options, ("true",), "name", Path("/logs")))[0])


def test_one_task_on_each_node_finds_its_number_by_the_name_of_its_node():
    argv = command(Allocated("17", arguments=(("--gres=gpu:2",),)), HOSTS)
    assert argv[:6] == ["srun", "--gres=gpu:2", "--jobid=17", "--nodes=2", "--ntasks=2", "--nodelist=h7,h2"]
    assert "--overlap" not in argv
    shell = argv[argv.index("/bin/sh") :]
    shell[2] = shell[2].replace('"$p" -I', 'echo "$p" "$i" #')
    for name, said in (("h7", f"{sys.executable} 0\n"), ("h2", "/opt/it's/python 1\n")):
        ran = subprocess.run(shell, env={"SLURMD_NODENAME": name, "PATH": "/bin"}, capture_output=True, text=True)
        assert (ran.stdout, ran.stderr) == (said, "")


def test_a_later_step_and_one_inside_of_a_step_share_the_resources():
    assert "--overlap" in command(Allocated("17"), HOSTS, again=True)
    assert "--overlap" in command(Allocated("17", shares=True), HOSTS)


def test_one_srun_starts_the_bridges_of_all_components_with_the_options_of_each():
    """And those of one component only, for a host that is reached again."""
    allocated = Allocated("17", arguments=((), ("--comment=x",)), components={"h7": 1, "h2": 0, "h3": 1})
    argv = command(allocated, [*HOSTS, Host("h3")])
    first, second = argv[1 : argv.index(":")], argv[argv.index(":") + 1 :]
    assert first[:5] == ["--het-group=0", "--jobid=17", "--nodes=1", "--ntasks=1", "--nodelist=h2"]
    wanted = ["--comment=x", "--het-group=1", "--jobid=17", "--nodes=2", "--ntasks=2", "--nodelist=h7,h3"]
    assert second[:6] == wanted
    assert first[first.index("/bin/sh") :] == second[second.index("/bin/sh") :], "the number is that of the host"
    assert "h3) i=2; " in second[-1]
    alone = command(allocated, [Host("h3")], again=True)
    assert alone[1:3] == ["--comment=x", "--het-group=1"] and ":" not in alone and "--overlap" in alone


def test_of_two_components_the_first_has_the_workers_and_the_second_the_servers(scontrol):
    environ = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "h[1-3]"}
    environ |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "h1 h2", "SLURM_JOB_NODELIST_HET_GROUP_1": "h3"}
    components = components_of(AllOptions(), environ)
    assert components == ["h1 h2", "h3"]
    found = {host.name: host.roles for host in hosts_of(AllOptions(), components)}
    assert found == {"h1": ("worker",), "h2": ("worker",), "h3": ("scheduler", "server")}
    named = hosts_of(replace(AllOptions(), hosts="h1,h3"), components)
    assert [(host.name, host.roles) for host in named] == [("h1", ()), ("h3", ())], "the user says it"
    with pytest.raises(LaunchError, match="this allocation has 3 components: expected one, or two, of which the first"):
        hosts_of(AllOptions(), ["h1", "h2", "h3"])


def test_servers_with_nodes_of_their_own_are_a_component_of_the_submitted_job():
    own = ("--gres=gpu:2", "--signal=R:USR1@60")
    options = replace(AllOptions(), num_workers=2, num_servers=1, queue="gpu", slurm_args=own)
    assert ":" not in submitted(options)
    asked = replace(options, slurm_server_args=("--partition=cpu", "--mem=8G"))
    argv = submitted(asked)
    at = argv.index(":")
    assert argv[2:4] == ("--job-name=name", "--nodes=2") and argv[at - 3 : at] == ("--partition=gpu", *own)
    assert argv[at:] == (":", "--job-name=name", "--nodes=1", "--partition=cpu", "--mem=8G")


def test_what_a_script_says_about_its_own_steps_does_not_reach_srun():
    assert {"SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_MEM_PER_CPU"} <= set(REMOVED)
    assert not {"SLURM_JOB_ID", "SLURM_CONF", "SLURM_JOB_NODELIST"} & set(REMOVED)


@pytest.fixture
def scontrol(tmp_path, monkeypatch) -> None:
    """One that knows h[1-2], and lists of names with spaces between them."""
    known = 'if [ "$3" = "h[1-2]" ]; then echo h1; echo h2; else printf "%s\\n" $3; fi'
    shell_script(tmp_path / "scontrol", known)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")


def test_no_allocation_and_other_hosts_are_refused_with_a_fix(scontrol):
    with pytest.raises(LaunchError, match="needs an allocation of Slurm, and there is none here: run `salloc -N 2 dml"):
        components_of(AllOptions(), {})
    assert components_of(AllOptions(), {"SLURM_JOB_NODELIST": "h[1-2]"}) == ["h[1-2]"]
    assert [host.name for host in hosts_of(replace(AllOptions(), exclude="h1"), ["h[1-2]"])] == ["h2"]
    assert [host.name for host in hosts_of(replace(AllOptions(), hosts="h2"), ["h[1-2]"])] == ["h2"]
    with pytest.raises(LaunchError, match=r"h3 is not in this allocation, which has h\[1-2\]"):
        hosts_of(replace(AllOptions(), hosts="h1,h3"), ["h[1-2]"])
    with pytest.raises(LaunchError, match="srun takes no user and no port for h1: remove them"):
        hosts_of(replace(AllOptions(), hosts="ann@h1"), ["h[1-2]"])


def test_squeue_is_asked_for_the_nodes_of_another_allocation(tmp_path, monkeypatch):
    squeue = tmp_path / "squeue"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    asked = replace(AllOptions(), slurm_job=17)
    for script, words in (
        ("echo down >&2; exit 1", "--slurm-job 17: squeue failed: down"),
        ("exit 0", "Slurm's job 17 has ended, or does not run yet"),
    ):
        shell_script(squeue, script)
        with pytest.raises(LaunchError, match=words):
            components_of(asked, {})
    squeue.write_text('#!/bin/sh\n[ "$2" = --jobs=17 ] && echo "17 h[1-2]"\n')
    assert components_of(asked, {"SLURM_JOB_NODELIST": "other"}) == ["h[1-2]"]
    squeue.write_text("#!/bin/sh\necho 17+1 h3; echo '17+0 h[1-2]'\n")
    assert components_of(asked, {}) == ["h[1-2]", "h3"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slurm_args": ("--signal=B:USR1@60",)}, "--slurm-args=--signal=B:USR1@60 would end the launcher: leave B:"),
        ({"slurm_args": ("--signal=RB:USR1",)}, "--slurm-args=--signal=RB:USR1 would end the launcher: leave B: out"),
        ({"slurm_args": ("--gpus-per-task=1",)}, "counts tasks of srun, .* --slurm-args=--gpus-per-node=N"),
        ({"slurm_server_args": ("--signal=B:USR1",)}, "--slurm-server-args=--signal=B:USR1 would end the launcher"),
        ({"slurm_server_args": ("--mem=8G",), "num_servers": 0}, "--slurm-server-args needs servers, and this job has"),
    ],
)
def test_arguments_of_sbatch_that_do_not_do_what_they_seem_to_are_refused(given, said):
    with pytest.raises(LaunchError, match=said):
        submitted(replace(AllOptions(num_workers=1, num_servers=1), **given))
