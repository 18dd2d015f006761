"""srun's command line and the choice of nodes, without Slurm."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from launch import LaunchError
from launch.clusters.queue import Inside
from launch.clusters.slurm import REMOVED, command, hosts_of, nodes_of, sbatch
from launch.command_line.options import Options
from launch.job.host import Host

HOSTS = [Host("h7"), Host("h2", python="/opt/it's/python")]


def test_one_task_on_each_node_finds_its_number_by_the_name_of_its_node(tmp_path):
    argv = command(("--gres=gpu:2",), "17", False, HOSTS)
    assert argv[:6] == ["srun", "--gres=gpu:2", "--jobid=17", "--nodes=2", "--ntasks=2", "--nodelist=h7,h2"]
    assert "--overlap" not in argv
    shell = argv[argv.index("/bin/sh") :]
    shell[2] = shell[2].replace('"$p" -I', 'echo "$p" "$i" #')
    for name, said in (("h7", f"{sys.executable} 0\n"), ("h2", "/opt/it's/python 1\n")):
        ran = subprocess.run(shell, env={"SLURMD_NODENAME": name, "PATH": "/bin"}, capture_output=True, text=True)
        assert (ran.stdout, ran.stderr) == (said, "")


def test_a_later_step_and_one_inside_of_a_step_share_the_resources():
    assert "--overlap" in command((), "17", False, HOSTS, again=True)
    assert "--overlap" in command((), "17", True, HOSTS)


def test_what_a_script_says_about_its_own_steps_does_not_reach_srun():
    assert {"SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_MEM_PER_CPU"} <= set(REMOVED)
    assert not {"SLURM_JOB_ID", "SLURM_CONF", "SLURM_JOB_NODELIST"} & set(REMOVED)


def test_no_allocation_and_other_hosts_are_refused_with_a_fix(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho h1; echo h2\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(LaunchError, match="needs an allocation of Slurm, and there is none here: run `salloc -N 2 dml"):
        nodes_of(Options(), {})
    assert nodes_of(Options(), {"SLURM_JOB_NODELIST": "h[1-2]"}) == "h[1-2]"
    assert [host.name for host in hosts_of(replace(Options(), exclude="h1"), "h[1-2]")] == ["h2"]
    assert [host.name for host in hosts_of(replace(Options(), hosts="h2"), "h[1-2]")] == ["h2"]
    with pytest.raises(LaunchError, match=r"h3 is not in this allocation, which has h\[1-2\]"):
        hosts_of(replace(Options(), hosts="h1,h3"), "h[1-2]")
    with pytest.raises(LaunchError, match="srun takes no user and no port for h1: remove them"):
        hosts_of(replace(Options(), hosts="ann@h1"), "h[1-2]")


def test_squeue_is_asked_for_the_nodes_of_another_allocation(tmp_path, monkeypatch):
    squeue = tmp_path / "squeue"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    asked = replace(Options(), slurm_job=17)
    for script, words in (
        ("echo down >&2; exit 1", "--slurm-job 17: squeue failed: down"),
        ("exit 0", "Slurm's job 17 has ended, or does not run yet"),
    ):
        squeue.write_text(f"#!/bin/sh\n{script}\n")
        squeue.chmod(0o755)
        with pytest.raises(LaunchError, match=words):
            nodes_of(asked, {})
    squeue.write_text('#!/bin/sh\n[ "$2" = --jobs=17 ] && echo "h[1-2]"\n')
    assert nodes_of(asked, {"SLURM_JOB_NODELIST": "other"}) == "h[1-2]"


def test_arguments_of_sbatch_that_do_not_do_what_they_seem_to_are_refused(tmp_path):
    for wrong, words in (
        ("--signal=B:USR1@60", "would end the launcher: leave B: out"),
        ("--signal=RB:USR1", "would end the launcher: leave B: out"),
        ("--gpus-per-task=1", "counts tasks of srun, .* --slurm-args=--gpus-per-node=N"),
    ):
        options = replace(Options(), num_workers=1, slurm_args=(wrong,))
        with pytest.raises(LaunchError, match=f"--slurm-args={wrong} {words}"):
            sbatch(Inside(options, ("true",), "name", tmp_path))
    options = replace(Options(), num_workers=1, slurm_args=("--signal=R:USR1@60",), queue="night")
    assert "--partition=night" in sbatch(Inside(options, ("true",), "name", tmp_path))[0]
    assert "--signal=R:USR1@60" in sbatch(Inside(options, ("true",), "name", tmp_path))[0]
