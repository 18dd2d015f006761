"""The launcher's options as a value, from the command line and the configuration file."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain_launch.job.job import Setting
from dmltrain_launch.job.rule import Rule


@dataclass(frozen=True)
class Options:
    """The launcher's options. Times are in seconds, 0: no limit. `num_servers` None: one per worker."""

    launcher: str = ""  # "": ssh if hosts are given, else local
    num_workers: int | None = None
    num_servers: int | None = None
    # hosts
    hostfile: str = ""
    hosts: str = ""
    worker_hostfile: str = ""
    server_hostfile: str = ""
    include: str = ""
    exclude: str = ""
    placement: str = "dmlc"
    interface: str = ""
    subnet: str = ""
    # connections
    ssh: str = "paramiko"
    ssh_port: int = 0
    identity: str = ""
    accept_new_host_keys: bool = False
    connect_timeout: float = 10.0
    mpirun: str = "mpirun"
    mpirun_args: tuple[str, ...] = ()
    slurm_args: tuple[str, ...] = ()
    slurm_server_args: tuple[str, ...] = ()
    slurm_job: int = 0  # 0: that of the environment
    submit: bool = False
    launcher_inside: str = ""  # yes or no; "": as the launcher has it
    queue_wait: float | None = None  # s in the cluster's queue; None: as long as the cluster could ever take the job
    yarn_url: str = ""
    yarn_hosts: int = 0  # 0: one for each worker
    address: str = ""  # of a Ray cluster; "": auto
    ray_nodes: int = 0  # 0: one for each worker
    ray_resources: str = ""
    ray_strategy: str = "STRICT_SPREAD"
    ray_runtime_env: str = ""
    host_ip: str = ""
    # Kubernetes
    image: str = ""
    kube_namespace: str = ""
    kube_context: str = ""
    kube_template: str = ""
    kube_pods: int = 0  # 0: one for each worker
    kube_service_account: str = ""
    kube_jobset: str = "auto"
    queue: str = ""
    # processes
    settings: tuple[Setting, ...] = ()
    torch_env: str = "auto"
    wire: str = "plain"
    sync_dst_dir: str = ""
    sync_exclude: tuple[str, ...] = ()
    port: int = 0
    worker_memory: int = 0  # MiB; 0: no limit
    server_memory: int = 0
    worker_gpus: int = 0
    # logs and limits
    log_dir: str = ""
    log_file: str = ""
    log_level: str = "INFO"
    job: str = ""
    grace: float = 5.0
    timeout: float = 0.0
    start_timeout: float = 60.0
    max_restarts: int = 0
    detach: bool = False
    elastic: bool = False
    min_workers: int | None = None  # of an elastic job; None: 1
    restart_workers: int | None = None  # of an elastic job; None: 0
    restart_servers: int | None = None  # of an elastic job; None: 0
    restart_scheduler: int | None = None  # of an elastic job; None: 3
    most_workers: int = 0  # of an elastic job, as hosts come; 0: -n N gives none
    watch_hosts: bool = False
    wait_for_hosts: float | None = None  # s that an elastic job waits below its minimum; None: 0
    rules: tuple[Rule, ...] = ()
    usage: float = 2.0
    quiet: bool = False
    live: bool = True
    # modes
    mode: str = ""  # "" to start a job; help, version, check, dry-run, plan, ps, kill, attach or logs
    target: str = ""  # the job of ps, kill, attach or logs
    follow: bool = False
    show: str = ""
    config: str = ""
    program: tuple[str, ...] = ()

    @property
    def names_hosts(self) -> bool:
        return bool(self.hostfile or self.hosts or self.worker_hostfile or self.server_hostfile)

    @property
    def launcher_name(self) -> str:
        """The launcher to use: --launcher, or the default."""
        return self.launcher or ("ssh" if self.names_hosts else "local")
