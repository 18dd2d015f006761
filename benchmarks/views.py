"""What a change of view costs an elastic job, against its number of members.

    python benchmarks/views.py [--members 3,10,30,100,300,1000] [--servers 20] [--turns 10] [--format json]

A real scheduler runs in a process of its own. All members have their real control links to it, in one other process,
and hold the same op. In each turn the link of one member ends, as with kill -9. The elapsed time goes from there until
the last member has the next view; all members share one Python process, so with many it is mostly their own time. The
scheduler's CPU time is what a job has on a machine of its own.
"""

import argparse
import multiprocessing
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence

import psutil
from report import facts, installed, show, spread

ELASTIC = 1  # members at least
PATIENCE = 600.0  # seconds; no member may count as lost because this machine is busy


def environment(role: str, index: int, members: int, servers: int, port: int, listen: int | None = None):
    from dmltrain.base.env import Environment

    return Environment(
        role=role,
        index=index,
        num_workers=members,
        num_servers=servers,
        root_port=port,
        job="views",
        key=b"views",
        listen_fd=listen,
        heartbeat_seconds=PATIENCE / 3,
        lost_seconds=PATIENCE,
        start_seconds=PATIENCE,
        elastic=ELASTIC,
        launched=True,
    )


def schedule(listening: socket.socket, members: int, servers: int) -> None:
    from dmltrain.kvstore.scheduler.process import SchedulerProcess

    port = listening.getsockname()[1]
    SchedulerProcess(environment("scheduler", 0, members, servers, port, listening.fileno())).run()


class Members:
    """The control links of all members and servers."""

    def __init__(self, members: int, servers: int, port: int) -> None:
        from dmltrain.kvstore.scheduler.client import Control
        from dmltrain.kvstore.transport.message.views import Enter, Flush, Flushed, Invite, Ready

        self._entered = threading.Condition()
        self._newest: dict[int, int] = {}  # member -> view
        self._controls = {}
        self._servers = [
            Control(environment("server", number, members, servers, port), on_message={Enter: lambda message: None})
            for number in range(servers)
        ]
        for member in range(members):
            handlers = {
                Flush: lambda flush, member=member: self._controls[member].send(Flushed(flush.view, flush.turn, 0)),
                Enter: lambda enter, member=member: self._note(member, enter.view.number),
                Invite: lambda invite: None,
            }
            self._controls[member] = Control(environment("worker", member, members, servers, port), on_message=handlers)
        for control in self._controls.values():
            control.wait_for_start()
            control.report(Ready())
        self.wait_for(1)

    def _note(self, member: int, view: int) -> None:
        with self._entered:
            self._newest[member] = view
            self._entered.notify_all()

    def wait_for(self, view: int) -> None:
        """Until all members have this view."""
        with self._entered:
            if not self._entered.wait_for(
                lambda: all(self._newest.get(control) == view for control in self._controls), PATIENCE
            ):
                raise SystemExit(f"view {view} did not come within {PATIENCE:.0f} s")

    def lose(self, view: int) -> float:
        """The seconds from the end of one member's link until all others have this view."""
        lost = self._controls.pop(max(self._controls))
        begun = time.perf_counter()
        lost.close()
        self.wait_for(view)
        return time.perf_counter() - begun

    def close(self) -> None:
        """The servers first: with the last worker the scheduler ends, which they must not take for a loss."""
        for control in (*self._servers, *self._controls.values()):
            control.bye(done=0)
            control.close()


def changes(members: int, servers: int, turns: int) -> dict[str, object]:
    """Elapsed time and the scheduler's CPU time of `turns` losses, in ms each."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    scheduler = multiprocessing.get_context("fork").Process(target=schedule, args=(listening, members, servers))
    scheduler.start()
    try:
        job = Members(members, servers, listening.getsockname()[1])
        elapsed, cpu = [], []
        for turn in range(min(turns, members - ELASTIC)):
            before = _cpu_seconds(scheduler.pid)
            elapsed.append(1000 * job.lose(turn + 2))
            cpu.append(1000 * (_cpu_seconds(scheduler.pid) - before))
        job.close()
        scheduler.join(PATIENCE)  # it ends when all have left, and may have a line to write until then
    finally:
        scheduler.kill()
        scheduler.join()
        listening.close()
    return {"members": members, "elapsed": spread(elapsed), "scheduler": statistics.mean(cpu)}


def _cpu_seconds(pid: int | None) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def table(result: dict) -> str:
    found = ["| members | until all have the next view, ms | longest, ms | CPU of the scheduler, ms |"]
    found += ["| ---: | ---: | ---: | ---: |"]
    for row in result["changes"]:
        elapsed = row["elapsed"]
        found.append(f"| {row['members']} | {elapsed['median']:.1f} | {elapsed['max']:.1f} | {row['scheduler']:.1f} |")
    return "\n".join(found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="3,10,30,100,300,1000", help="numbers of members, default: %(default)s")
    parser.add_argument("--servers", type=int, default=20)
    parser.add_argument("--turns", type=int, default=10, help="losses for each number, default: %(default)s")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args(argv)
    versions = {"dmltrain": installed("dmltrain")}
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.setswitchinterval(0.05)  # thousands of threads share this process
    found = [changes(int(members), options.servers, options.turns) for members in options.members.split(",")]
    result = {**facts("views.py", argv, versions), "changes": found}
    show(result, options.format, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
