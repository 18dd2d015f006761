"""The launcher's options: a row for each. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from dmltrain_launch import LaunchError
from dmltrain_launch.clusters import LAUNCHERS, listing
from dmltrain_launch.clusters.in_ray import placement as ray_placement
from dmltrain_launch.command_line import old_options
from dmltrain_launch.command_line.option import (
    Option,
    append,
    changed,
    checked,
    choice,
    constant,
    extend,
    mode,
    number,
    secret,
    setting,
    text,
    url,
)
from dmltrain_launch.job import placement
from dmltrain_launch.job.job import WIRES
from dmltrain_launch.job.options import Options
from dmltrain_launch.job.role import SERVER, WORKER
from dmltrain_launch.job.rule import EXAMPLE, parse_rule

FILE = "a file"


def _workers(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    least, colon, most = value.partition(":")
    options = number("num_workers", int, 1)(options, least, name, environ)
    if not colon:
        return replace(options, most_workers=0)
    return number("most_workers", int, options.num_workers or 1)(options, most, f"{name} {least}:M, M", environ)


def use_launcher(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if value not in LAUNCHERS:
        why = old_options.unsupported_cluster(value)
        raise LaunchError(f"{name} {value}: expected {listing()}" + (f"; {why}" if why else ""))
    return replace(options, launcher=value)


def _job(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if not re.fullmatch(r"[^/\0\n]{1,100}", value) or value in (".", ".."):
        raise LaunchError(f"{name} is {value!r}: expected a folder name without / and of at most 100 characters")
    return replace(options, job=value)


def _destination(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    if not value.startswith(("/", "~")):
        raise LaunchError(f"{name} is {value!r}: expected a path on every host that starts with / or ~/")
    return replace(options, sync_dst_dir=value)


def _rule(options: Options, value: str, name: str, environ: Mapping[str, str]) -> Options:
    try:
        return changed(options, "rules", (*options.rules, parse_rule(value)))
    except LaunchError as error:
        raise LaunchError(f"{name} {error}") from None


OPTIONS: tuple[Option, ...] = (
    Option(
        ("-n", "--num-workers"),
        "N[:M]",
        "number of workers; with --elastic N:M: at least N, and up to M as there are hosts for them",
        _workers,
    ),
    Option(
        ("-s", "--num-servers"),
        "N",
        "number of servers (default: one per worker; 0: only workers)",
        number("num_servers", int, 0),
    ),
    Option(
        ("--launcher", "--cluster"),
        "NAME",
        f"where to run: {listing()} (default: ssh if hosts are given, otherwise local)",
        use_launcher,
    ),
    Option(
        ("-H", "--hostfile", "--host-file"),
        "FILE",
        "hosts file; hosts.example describes the format",
        text("hostfile", FILE),
    ),
    Option(("--hosts",), "A:2,B:4", "hosts and their slots, instead of a hosts file", extend("hosts", "hosts")),
    Option(("-WH", "--worker-hostfile"), "FILE", "hosts file for the workers", text("worker_hostfile", FILE)),
    Option(
        ("-SH", "--server-hostfile"),
        "FILE",
        "hosts file for the scheduler and the servers",
        text("server_hostfile", FILE),
    ),
    Option(
        ("--include",),
        "NAMES",
        "use only these hosts: names, ranges such as node[01-08], patterns",
        extend("include", "host names"),
    ),
    Option(("--exclude",), "NAMES", "do not use these hosts", extend("exclude", "host names")),
    Option(
        ("--placement",),
        "POLICY",
        f"which process runs on which host: {placement.listing()} (default: dmlc)",
        choice("placement", placement.POLICIES),
    ),
    Option(
        ("--interface",),
        "NIC",
        "network interface for training (default: the one on the network that all hosts share)",
        text("interface", "an interface such as eth1"),
    ),
    Option(("--subnet",), "NET", "network for training, such as 10.0.0.0/24", text("subnet", "a network")),
    Option(
        ("--ssh",),
        "paramiko|system",
        "SSH client (default: paramiko); system: the ssh command with its full configuration",
        choice("ssh", ("paramiko", "system")),
    ),
    Option(
        ("--ssh-port",),
        "PORT",
        "port of sshd unless the hosts file gives one (default: from the SSH configuration)",
        number("ssh_port", int, 1, 65535),
    ),
    Option(("-i", "--identity"), "FILE", "private key for SSH", text("identity", FILE)),
    Option(
        ("--accept-new-host-keys",),
        "",
        "accept and store unknown host keys",
        constant("accept_new_host_keys", True),
    ),
    Option(
        ("--connect-timeout",),
        "SECONDS",
        "time limit for connecting to a host (default: 10)",
        number("connect_timeout", float, 1),
    ),
    Option(
        ("--mpirun",),
        "PATH",
        "mpirun of Open MPI or MPICH, for --launcher mpi (default: mpirun)",
        text("mpirun", "a program"),
    ),
    Option(("--mpirun-args",), "ARG", "extra argument for mpirun; may be repeated", append("mpirun_args")),
    Option(
        ("--slurm-args",),
        "ARG",
        "extra argument for srun, or for sbatch with --submit; may be repeated",
        append("slurm_args"),
    ),
    Option(
        ("--slurm-server-args",),
        "ARG",
        "the same for the nodes of the servers, the second component of a heterogeneous job; may be repeated",
        append("slurm_server_args"),
    ),
    Option(("--submit",), "", "put the job into the cluster's queue, and return", constant("submit", True)),
    Option(
        ("--slurm-job",),
        "ID",
        "allocation of Slurm to use (default: the one that this command runs in)",
        number("slurm_job", int, 1),
    ),
    Option(
        ("--yarn-url",),
        "URL",
        "web address of YARN's ResourceManager, such as http://rm:8088",
        url("yarn_url"),
    ),
    Option(
        ("--yarn-hosts",),
        "N",
        "containers of YARN that the processes are spread over (default: one per worker)",
        number("yarn_hosts", int, 1),
    ),
    Option(
        ("--address",),
        "HOST:PORT|URL",
        "Ray cluster to use, for --launcher ray; if its launcher is to run in Ray, the URL of Ray's dashboard "
        "(default: auto, the cluster that this machine belongs to)",
        text("address", "auto, HOST:PORT or a URL"),
    ),
    Option(
        ("--ray-nodes",),
        "N",
        "bundles of Ray's placement group, each on a node of its own (default: one per worker)",
        number("ray_nodes", int, 1),
    ),
    Option(
        ("--ray-resources",),
        "CPU=8,GPU=2",
        "resources of each bundle, by Ray's names, also memory=16g and your own (default: CPU=1)",
        checked("ray_resources", ray_placement.resources),
    ),
    Option(
        ("--ray-strategy",),
        "NAME",
        f"how Ray spreads the bundles: {ray_placement.listing()} (default: {ray_placement.STRICT_SPREAD})",
        choice("ray_strategy", ray_placement.STRATEGIES),
    ),
    Option(
        ("--ray-runtime-env",),
        "FILE|JSON",
        "runtime environment of the job in Ray: a YAML or JSON file, or JSON",
        text("ray_runtime_env", "a file or JSON"),
    ),
    Option(
        ("--launcher-inside",),
        "yes|no",
        "run the launcher in the cluster too, and follow its output here (default for kubernetes and yarn: yes)",
        choice("launcher_inside", ("yes", "no")),
    ),
    Option(("--image",), "IMAGE", "container image for all pods of the job", text("image", "an image")),
    Option(
        ("--kube-namespace",),
        "NAME",
        "namespace of Kubernetes (default: that of the kubeconfig's context)",
        text("kube_namespace", "a namespace"),
    ),
    Option(
        ("--kube-context",),
        "NAME",
        "context of the kubeconfig file (default: the current one)",
        text("kube_context", "a context"),
    ),
    Option(
        ("--kube-template",),
        "FILE",
        "YAML file with a pod's template: volumes, node selectors, tolerations and the like for all pods",
        text("kube_template", FILE),
    ),
    Option(
        ("--kube-pods",),
        "N",
        "how many pods the processes are spread over (default: one for each worker)",
        number("kube_pods", int, 1),
    ),
    Option(
        ("--kube-service-account",),
        "NAME",
        "service account for the launcher's pod (default: a new one, which goes with the job)",
        text("kube_service_account", "a service account"),
    ),
    Option(
        ("--kube-jobset",),
        "auto|on|off",
        "make the job a JobSet, which was checked against schemas only, not with a controller (default: auto: if the "
        "cluster has JobSet and the job needs no replacement pods)",
        choice("kube_jobset", ("auto", "on", "off")),
    ),
    Option(("--queue",), "NAME", "queue of YARN or Kueue, or of Slurm with --submit", text("queue", "a queue")),
    Option(
        ("--queue-wait",),
        "SECONDS",
        "time limit for the wait for room in the cluster; then the exit code is 124 (default: no limit, but Ray must "
        "have enough nodes)",
        number("queue_wait", float, 0),
    ),
    Option(
        ("--worker-gpus",),
        "N",
        "GPUs of each worker, which Kubernetes or YARN is asked for",
        number("worker_gpus", int, 1),
    ),
    Option(
        ("--sync-dst-dir",),
        "DIR",
        "copy the working directory to DIR (such as '~/job') on every host and run there",
        _destination,
    ),
    Option(
        ("--sync-exclude",),
        "PATTERN",
        "do not copy matching files (syntax of .gitignore); may be repeated",
        append("sync_exclude"),
    ),
    Option(
        ("--env",),
        "K[=V]",
        "environment variable for all processes: K=V or K:V; K alone passes on the launcher's value",
        setting(""),
    ),
    Option(("--env-server",), "K[=V]", "environment variable for the servers only", setting(SERVER)),
    Option(("--env-worker",), "K[=V]", "environment variable for the workers only", setting(WORKER)),
    Option(("--secret",), "NAME", "pass on the launcher's variable NAME and never show its value", secret),
    Option(
        ("--torch-env",),
        "auto|on|off",
        "set the variables of torch.distributed (RANK, MASTER_ADDR, ...) for workers; auto (default): "
        "unless the script imports dmltrain",
        choice("torch_env", ("auto", "on", "off")),
    ),
    Option(
        ("--wire",),
        "plain|auth|tls",
        "protect the traffic of dmltrain's processes: authenticate control frames (plain, the default), all frames "
        "(auth), or encrypt everything as well (tls)",
        choice("wire", WIRES),
    ),
    Option(("--log-dir",), "DIR", "folder for the logs and job.json (default: logs/JOB)", text("log_dir", "a folder")),
    Option(("--log-file",), "FILE", "also write the launcher's messages to FILE", text("log_file", FILE)),
    Option(("--job", "--jobname"), "NAME", "name of the job (default: program and start time)", _job),
    Option(("--port",), "PORT", "TCP port of the scheduler (default: any free port)", number("port", int, 0)),
    Option(
        ("--grace",),
        "SECONDS",
        "time between SIGTERM and SIGKILL when the job ends (default: 5)",
        number("grace", float, 0),
    ),
    Option(
        ("--timeout",),
        "SECONDS",
        "end the job after this time, log all stacks and exit with 124 (default: no limit)",
        number("timeout", float, 0),
    ),
    Option(
        ("--start-timeout",),
        "SECONDS",
        "time limit for starting all processes, not counting the copy (default: 60)",
        number("start_timeout", float, 0),
    ),
    Option(
        ("--max-restarts",),
        "N",
        "restart a failed job at most N times (default: 0)",
        number("max_restarts", int, 0),
    ),
    Option(
        ("--rule",),
        "RULE",
        f"change the kvstore while the job runs: '{EXAMPLE}'; may be repeated",
        _rule,
    ),
    Option(
        ("--detach",),
        "",
        "return when the job runs; it goes on if its launcher dies, and dmltrain job attach JOB takes it up",
        constant("detach", True),
    ),
    Option(
        ("--elastic",),
        "",
        "go on when workers, servers or the scheduler are lost; needs PyTorch and dist_sync, dist_async or dist_ssp",
        constant("elastic", True),
    ),
    Option(
        ("--min-workers",),
        "M",
        "with --elastic: end the job when fewer than M workers are left (default: 1; with -n N:M: N)",
        number("min_workers", int, 1),
    ),
    Option(
        ("--restart-workers",),
        "N",
        "with --elastic: replace lost workers, at most N times (default: 0)",
        number("restart_workers", int, 0),
    ),
    Option(
        ("--restart-servers",),
        "N",
        "with --elastic: replace lost servers, at most N times (default: 0)",
        number("restart_servers", int, 0),
    ),
    Option(
        ("--restart-scheduler",),
        "N",
        "with --elastic: start the scheduler again when it is lost, at most N times (default: 3)",
        number("restart_scheduler", int, 0),
    ),
    Option(
        ("--watch-hosts",),
        "",
        "with --elastic: read the hosts file again when it changes; new hosts get workers, those that are gone leave",
        constant("watch_hosts", True),
    ),
    Option(
        ("--wait-for-hosts",),
        "SECONDS",
        "with --elastic: when fewer workers than the minimum are left, wait so long for more (default: 0)",
        number("wait_for_hosts", float, 0),
    ),
    Option(
        ("--usage",),
        "SECONDS",
        "sample the CPUs, memory and GPUs of each host every SECONDS, and less often in a long job, into usage.csv; "
        "0: never (default: 2)",
        number("usage", float, 0),
    ),
    Option(("--quiet",), "", "do not show the output of the processes; the logs have it", constant("quiet", True)),
    Option(("--no-live",), "", "print plain lines instead of the live display", constant("live", False)),
    Option(
        ("--config",), "FILE", "YAML file with these options; the command line takes precedence", text("config", FILE)
    ),
    Option(
        ("--check",),
        "",
        "check the hosts and the network between them; forecast the speed of a training program",
        mode("check"),
    ),
    Option(("--dry-run",), "", "print the commands for each host and start nothing", mode("dry-run")),
    Option(("--plan",), "", "print as JSON which process runs on which host and start nothing", mode("plan")),
    Option(("--ps",), "JOB", "list the processes of a job (its name or its log folder)", mode("ps")),
    Option(("--kill",), "JOB", "end a job and all processes that it left on its hosts", mode("kill")),
    Option(("--attach",), "JOB", "take up a job that was started with --detach", mode("attach")),
    Option(("--logs",), "JOB", "print the logs of a job", mode("logs")),
    Option(("--follow",), "", "with --logs: continue until the job ends", constant("follow", True)),
    Option(("--show",), "WHO", "with --logs: only these processes, such as worker:0,scheduler", text("show", "roles")),
    Option(("--version",), "", "print the version and exit", mode("version")),
    Option(("-h", "--help"), "", "print this help and exit", mode("help")),
)
OPTIONS = (*OPTIONS, *old_options.ROWS)
BY_NAME = {name: option for option in OPTIONS for name in option.names}
BY_NAME |= {theirs: BY_NAME[ours] for theirs, ours in old_options.ALIASES.items()}
BY_NAME |= {name: row for row in old_options.REFUSED for name in row.names}
