"""The hosts that a user names, in files or in a list, for any launcher that accepts them."""

from __future__ import annotations

from dmltrain_launch import LaunchError
from dmltrain_launch.job import hosts
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts.selection import select
from dmltrain_launch.job.options import Options


def named_hosts(options: Options) -> list[Host]:
    """The hosts that the options name; LaunchError if the options are wrong."""
    if options.worker_hostfile or options.server_hostfile:
        if not (options.worker_hostfile and options.server_hostfile):
            raise LaunchError("-WH and -SH need each other: one hosts file for workers, one for servers")
        if options.hostfile or options.hosts:
            raise LaunchError("-WH and -SH cannot be used with -H or --hosts: remove -H and --hosts")
        listed = hosts.by_roles(hosts.read(options.worker_hostfile), hosts.read(options.server_hostfile))
    elif options.hostfile and options.hosts:
        raise LaunchError("-H and --hosts cannot be used together: remove one of them")
    elif options.hostfile:
        listed = hosts.read(options.hostfile)
    elif options.hosts:
        listed = hosts.from_list(options.hosts)
    else:
        raise LaunchError(
            "no hosts given: use -H FILE (one host per line), --hosts a,b, or --launcher local for this machine"
        )
    return select(listed, options.include, options.exclude)
