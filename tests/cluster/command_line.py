"""The command line of the test bed: `main(argv)` -> exit code."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.cluster.layout import LOGIN, Settings
from tests.cluster.testbed import Testbed, TestbedError, missing

PROGRAM = Path("tests/cluster/testbed.py")
CHECKOUT = Path(__file__).resolve().parents[2]
FAULTS = {
    "kill": "power loss: peers hear nothing any more, every process is gone",
    "boot": "start dead hosts",
    "partition": "these hosts reach each other and nobody else; their links stay up",
    "unplug": "these hosts lose their cables, and see it",
    "heal": "undo partition and unplug, for these hosts or for all",
    "freeze": "stop every process; the kernel still acknowledges what peers send",
    "thaw": "undo freeze",
    "kill-sshd": "sshd and its sessions die, and nothing else",
    "start-sshd": "start sshd again",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog=str(PROGRAM),
        description="Hosts on one machine, with sshd and shaped links. Needs root. See docs/testbed.md.",
    )
    top.add_argument("--name", default="default", help="of the test bed: several may be up at once (default: default)")
    commands = top.add_subparsers(dest="do", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="have the hosts up and whole; what is not given stays as it was")
    up.add_argument("--hosts", type=int, metavar="N", help="h1 to hN (default: 5)")
    up.add_argument("--rate", help="of each host's link, each way: 1gbit, 100mbit; 0: no limit (default: 1gbit)")
    up.add_argument("--private", action="append", metavar="DIR", help="empty on each host and its own, as /tmp is")
    up.add_argument("--share", action="append", metavar="DIR", help="seen by all hosts though in /tmp or a private DIR")
    execute = commands.add_parser("exec", help="run a command on a host (login, h1, ...) here and now, without SSH")
    execute.add_argument("host")
    execute.add_argument("argv", nargs=argparse.REMAINDER, metavar="command")
    for name, meaning in FAULTS.items():
        commands.add_parser(name, help=meaning).add_argument("hosts", nargs="*" if name == "heal" else "+")
    rate = commands.add_parser("rate", help="another rate for one host's link, each way, until up")
    rate.add_argument("host")
    rate.add_argument("rate")
    commands.add_parser("status", help="every host's state; exit code 1 when one is not whole")
    commands.add_parser("down", help="remove everything")
    return top


def given(old: Settings, arguments: argparse.Namespace) -> Settings:
    """`old`, with what the command line says; what is private now is shared no longer."""
    values = {name: value for name, value in vars(arguments).items() if name in ("hosts", "rate") and value is not None}
    private = old.private if arguments.private is None else tuple(map(os.path.abspath, arguments.private))
    share = [folder for folder in old.share if folder not in private]
    if arguments.share is not None:
        share = list(map(os.path.abspath, arguments.share))
    return replace(old, private=private, share=tuple(share), **values)


def defaults() -> Settings:
    """The checkout and this Python are seen by all hosts."""
    return Settings(share=(str(CHECKOUT), sys.prefix))


def up(bed: Testbed, arguments: argparse.Namespace) -> int:
    settings = given(bed.stored() or defaults(), arguments)
    bed.up(settings)
    print(invitation(bed, settings))
    return 0


def invitation(bed: Testbed, settings: Settings) -> str:
    """What there is, and the commands to try it with."""
    python = os.path.relpath(sys.executable) if Path.cwd() in Path(sys.executable).parents else sys.executable
    launcher = str(Path(python).with_name("dmltrain-launch"))
    name = "" if bed.layout.name == "default" else f" --name {bed.layout.name}"
    count, testbed = settings.hosts, f"{python} {os.path.relpath(CHECKOUT / PROGRAM)}{name}"
    launch = f"{testbed} exec {LOGIN} {launcher} -n {count} -s {count} -H {bed.hosts_file}"
    program = f"{os.path.relpath(CHECKOUT / 'examples/train_digits.py')} --kv-store dist_sync"
    return f"""Up: h1 ({bed.address("h1")}) to h{count} ({bed.address(f"h{count}")}), each with sshd and a link of \
{settings.rate}, and {LOGIN}.

Train on all of them, over SSH and over mpirun:
  {launch} {program}
  {launch} --launcher mpi {program}
Look around:
  {testbed} exec {LOGIN} ssh h1
  {testbed} status
Break something while it trains, from another terminal, and mend everything after:
  {testbed} kill h2      (also: partition, unplug, freeze, kill-sshd, rate h2 10mbit)
  {testbed} up
Remove it:
  {testbed} down"""


def show(bed: Testbed) -> int:
    rows = bed.status()
    print("\n".join(map(str, rows)))
    return 0 if all(row.sound for row in rows) else 1


def execute(bed: Testbed, host: str, argv: Sequence[str]) -> int:
    """Becomes the command; returns only when there is none."""
    if not argv:
        raise TestbedError(f"exec {host}: expected a command")
    command = bed.command(host, argv)
    os.execv(command[0], command)


def act(bed: Testbed, arguments: argparse.Namespace) -> int:
    if arguments.do == "up":
        return up(bed, arguments)
    if arguments.do == "status":
        return show(bed)
    if arguments.do == "exec":
        return execute(bed, arguments.host, arguments.argv)
    if arguments.do == "rate":
        bed.rate(arguments.host, arguments.rate)
    elif arguments.do == "down":
        bed.down()
    else:
        getattr(bed, arguments.do.replace("-", "_"))(*arguments.hosts)
    return 0


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        lacking = missing()
        if lacking:
            raise TestbedError(f"needs {lacking}")
        return act(Testbed(arguments.name), arguments)
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 2
