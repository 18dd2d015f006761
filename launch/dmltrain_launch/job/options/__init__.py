"""The launcher's options as a value, from the command line and the configuration file.

Each field says what the command line needs of its option: see `option`. There is one file for each group of options.
Those of one launcher stand beside that launcher (`dmltrain_launch.clusters`), in a class that adds them to these.
"""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain_launch.job.options.hosts import HostOptions
from dmltrain_launch.job.options.modes import ModeOptions
from dmltrain_launch.job.options.processes import ProcessOptions
from dmltrain_launch.job.options.run import RunOptions


@dataclass(frozen=True)
class Options(ModeOptions, RunOptions, ProcessOptions, HostOptions):  # the last base has the first fields
    """The options that do not belong to one launcher. Times are in seconds, 0: no limit. `num_servers` None: one per
    worker."""

    @property
    def names_hosts(self) -> bool:
        return bool(self.hostfile or self.hosts or self.worker_hostfile or self.server_hostfile)

    @property
    def servers(self) -> int:
        """How many there are to be."""
        return (self.num_workers or 1) if self.num_servers is None else self.num_servers

    @property
    def launcher_name(self) -> str:
        """The launcher to use: --launcher, or the default."""
        return self.launcher or ("ssh" if self.names_hosts else "local")
