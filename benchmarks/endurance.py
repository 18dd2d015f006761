"""An elastic job on five hosts, to which something happens every 20 s: does it come to its end, with each sample used
once in each epoch, and with the accuracy of a job to which nothing happens?

    sudo .venv/bin/python benchmarks/endurance.py --data-dir data/cifar10 [--seed 0] [--every 20] [--epochs 10]
    sudo .venv/bin/python benchmarks/endurance.py --data-dir data/cifar10 --every 0     # nothing happens

Each host has a worker and a server; h1 has the scheduler, too. What happens where, drawn by the seed: a worker, a
server, the scheduler or an agent is killed; a worker gets SIGTERM; a worker or a server is stopped for 30 s; a host is
switched off for 30 s; its cable is cut for 30 s, or for 5 s; or two hosts do not reach each other for 30 s. Those of
which nothing is heard but silence (`SILENT`) happen at most 16 times. Hosts without a worker come back by
`dmltrain job add`. The hosts share this machine's cores.

The result has how soon the members that are left had the next view after each kind of loss: from there they make the
interrupted step. A worker with SIGTERM first finishes its step.
"""

import argparse
import itertools
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from datetime import datetime
from pathlib import Path

from contest.bed import LOGIN, Bed, bed_of
from report import CHECKOUT, SEARCH_PATH, facts, fail, installed, show

from dmltrain.audit.count import count
from tests.cluster import cuts
from tests.cluster.processes import Process

HOSTS = 5
HEALED_AFTER, OUTAGE = 30.0, 5.0  # s
MOST_SILENT = 16
SILENT = ("stop a worker", "stop a server", "switch off", "cut", "cut from another")
FAULTS = ("kill a worker", "kill a server", "kill the scheduler", "kill an agent", "SIGTERM", "outage", *SILENT)
WITHOUT_A_VIEW = ("kill the scheduler", "outage")  # no worker or server is lost
RETURNS = 5.0  # s, between two looks for hosts that may come back
LIMIT = 3 * 3600.0  # s, of the job


class Trial:
    """One job."""

    def __init__(self, bed: Bed, folder: Path, options: argparse.Namespace) -> None:
        self.bed, self.testbed, self.folder, self.options = bed, bed.testbed, folder, options
        self.draw = random.Random(options.seed)
        self.happened: list[dict[str, object]] = []
        self.troubled: dict[str, Callable[[], None]] = {}  # hosts -> how they are healed
        self.due: dict[str, float] = {}  # when
        self.began = time.monotonic()

    def command(self) -> list[str]:
        options = self.options
        launch = [sys.executable, "-m", "dmltrain_launch.cli", "--launcher", "ssh", "--hosts", f"h[1-{HOSTS}]:1"]
        launch += ["-n", str(HOSTS), "-s", str(HOSTS), "--elastic", "--log-dir", "logs", "--env", "OMP_NUM_THREADS=1"]
        launch += ["--restart-workers", "1000", "--restart-servers", "1000", "--restart-scheduler", "1000"]
        launch += ["--wait-for-hosts", "300"]
        words = [*options.network.split(), "--data-dir", os.path.abspath(options.data_dir), "--kv-store", "dist_sync"]
        words += ["--batch-size", str(options.batch), "--num-epochs", str(options.epochs), "--seed", str(options.seed)]
        words += ["--lr-step-epochs", options.lr_step_epochs, "--audit", "audit", "--disp-batches", "1000"]
        return [*launch, str(CHECKOUT / "examples/train_cifar10.py"), *words]

    def run(self) -> dict[str, object]:
        with (self.folder / "output").open("wb") as output:
            job = self.start(self.command(), output)
            try:
                self.watch(job)
            finally:
                if job.poll() is None:
                    job.send_signal(signal.SIGINT)
                    job.wait(60)
                self.heal(all_of_them=True)
        return self.result(job.returncode)

    def start(self, words: list[str], output: object) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": SEARCH_PATH}
        more = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        return self.testbed.start(LOGIN, words, cwd=self.folder, env=environment, **more)

    def watch(self, job: subprocess.Popen) -> None:
        while "View 1 " not in self.log("worker-0") and job.poll() is None:
            time.sleep(0.1)
        self.began = time.monotonic()
        next_fault, next_look = self.began + self.options.every, self.began + RETURNS
        while job.poll() is None and time.monotonic() - self.began < LIMIT:
            now = time.monotonic()
            self.heal()
            if self.options.every and now >= next_fault:
                next_fault += self.options.every
                self.happen()
            if self.options.every and now >= next_look:
                next_look = now + RETURNS
                self.bring_back()
            time.sleep(0.1)

    def log(self, name: str) -> str:
        path = self.folder / f"logs/{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # -- faults -------------------------------------------------------------------------------------------------------

    def happen(self) -> None:
        silent = sum(str(each["what"]) in SILENT for each in self.happened)
        what = self.draw.choice([each for each in FAULTS if each not in SILENT or silent < MOST_SILENT])
        whole = [host for host in self.bed.hosts if host not in self.troubled]
        host, other = self.draw.sample(whole, 2)
        since = time.time()
        done = self.do(what, host, other)
        print(f"{self.seconds:.0f} s: {what} {done or 'nobody'}", file=sys.stderr, flush=True)
        if done:
            self.happened.append({"after": round(self.seconds, 1), "at": since, "what": what, "whom": done})

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def do(self, what: str, host: str, other: str) -> str:
        """Returns to whom it was done; "" if there is none."""
        match what:
            case "kill a worker" | "stop a worker" | "SIGTERM":
                return self.signal(what, self.of_role("worker", host), host)
            case "kill a server" | "stop a server":
                return self.signal(what, self.of_role("server", host), host)
            case "kill the scheduler":
                hosts = [host for host in self.bed.hosts if host not in self.troubled]
                return next(
                    (done for host in hosts if (done := self.signal(what, self.of_role("scheduler", host), host))), ""
                )
            case "kill an agent":
                found = [process for process in self.testbed.processes(host) if "dmltrain-agent" in process.argv]
                return self.signal(what, found, host)
            case "switch off":
                self.testbed.kill(host)
                self.later(host, HEALED_AFTER, lambda: self.testbed.boot(host))
            case "cut" | "outage":
                self.testbed.partition(host)
                self.later(host, OUTAGE if what == "outage" else HEALED_AFTER, lambda: self.testbed.heal(host))
            case "cut from another":
                cuts.blackhole(self.testbed.layout, host, other)
                cuts.blackhole(self.testbed.layout, other, host)
                self.later(host, HEALED_AFTER, lambda: cuts.heal(self.testbed.layout, [host, other]))
                return f"{host} and {other}"
        return host

    def of_role(self, role: str, host: str) -> list[Process]:
        return [process for process in self.testbed.processes(host) if f"DMLC_ROLE={role}" in process.environment]

    def signal(self, what: str, found: list[Process], host: str) -> str:
        if not found:
            return ""
        victim = self.draw.choice(found)
        number = signal.SIGTERM if what == "SIGTERM" else signal.SIGSTOP if "stop" in what else signal.SIGKILL
        os.kill(victim.pid, number)
        if number == signal.SIGSTOP:
            self.later(f"{host} {victim.pid}", HEALED_AFTER, lambda: resume(victim.pid))
        return f"one on {host}"

    def later(self, whom: str, seconds: float, heal: Callable[[], None]) -> None:
        self.troubled[whom], self.due[whom] = heal, time.monotonic() + seconds

    def heal(self, all_of_them: bool = False) -> None:
        for whom in [each for each, due in self.due.items() if all_of_them or time.monotonic() >= due]:
            self.troubled.pop(whom)()
            del self.due[whom]

    def bring_back(self) -> None:
        """Ask the job to take hosts on which no worker runs. It refuses some, such as those that it still cleans up."""
        for host in self.bed.hosts:
            if host in self.troubled or self.of_role("worker", host) or host in self.asked():
                continue
            words = [
                sys.executable,
                "-c",
                "import dmltrain_launch.cli; dmltrain_launch.cli.job_main()",
                "add",
                "logs",
                f"{host}:1",
            ]
            with (self.folder / f"add-{host}").open("ab") as output:
                process = self.start(words, output)
            threading.Thread(target=process.wait, name=f"add {host}", daemon=True).start()

    def asked(self) -> list[str]:
        """The hosts for which an earlier command still waits."""
        return [thread.name.split()[1] for thread in threading.enumerate() if thread.name.startswith("add ")]

    # -- the result -----------------------------------------------------------------------------------------------

    def result(self, code: int) -> dict[str, object]:
        output = (self.folder / "output").read_text(errors="replace")
        if code:
            print(output[-6000:], file=sys.stderr)
        if not (self.folder / "audit/views.json").exists():
            raise SystemExit(fail("endurance.py", f"the job has ended before its first step, with exit code {code}"))
        counted = count(self.folder / "audit")
        logs = [path.read_text(errors="replace") for path in (self.folder / "logs").glob("worker-*.log")]
        lines = [each for text in logs for each in re.findall(r"Epoch\[(\d+)\] Validation-accuracy=([\d.]+)", text)]
        accuracy = {int(epoch): float(value) for epoch, value in lines}
        views = json.loads((self.folder / "audit/views.json").read_text())["views"]
        changed = {f"{view['number']}" for view in views if view["lost"] or view["left"] or view["lost_servers"]}
        return {
            "exit_code": code,
            "seconds": self.seconds,
            "happened": self.happened,
            "views": len(views),
            "epochs": len(counted.times),
            "exact": not counted.problems and len(counted.times) == self.options.epochs,
            "problems": list(counted.problems)[:5],
            "until_the_next_view": until_the_next(self.happened, entered("\n".join(logs), changed)),
            "accuracy": [accuracy.get(epoch) for epoch in range(self.options.epochs)],
            "last_line": output.strip().splitlines()[-1][-2000:],
        }


def entered(logs: str, views: Collection[str]) -> list[float]:
    """When the first worker was in each of these views, s of the clock, ascending; by what the workers have logged."""
    found: dict[str, float] = {}
    for moment, view in re.findall(r"^(\S+ \S+) Node\[\d+\] View (\d+) after op", logs, re.MULTILINE):
        if view in views:
            at = datetime.strptime(moment, "%Y-%m-%d %H:%M:%S,%f").timestamp()
            found[view] = min(at, found.get(view, at))
    return sorted(found.values())


def until_the_next(happened: list[dict[str, object]], views: list[float]) -> dict[str, dict[str, float]]:
    """what -> the median of the seconds until the next of these moments, and of how many. Without those after which
    something else happened first: they have hit a process that was no member."""
    waits: dict[str, list[float]] = {}
    for each, then in itertools.zip_longest(happened, happened[1:]):
        later = [moment for moment in views if each["at"] < moment < (then["at"] if then else math.inf)]
        if later and each["what"] not in WITHOUT_A_VIEW:
            waits.setdefault(str(each["what"]), []).append(later[0] - each["at"])
    return {what: {"median": statistics.median(found), "of": len(found)} for what, found in sorted(waits.items())}


def resume(pid: int) -> None:
    if os.path.exists(f"/proc/{pid}"):
        os.kill(pid, signal.SIGCONT)


def table(result: dict) -> str:
    found = result["trial"]
    accuracy = ", ".join("-" if each is None else f"{each:.4f}" for each in found["accuracy"])
    return "\n".join(
        [
            f"exit code {found['exit_code']} after {found['seconds']:.0f} s; {len(found['happened'])} faults, "
            f"{found['views']} views; each sample once in {found['epochs']} epochs: {found['exact']}",
            f"validation accuracy by epoch: {accuracy}",
            "until the next view, s (median): "
            + ", ".join(
                f"{what} {each['median']:.2f} (of {each['of']})" for what, each in found["until_the_next_view"].items()
            ),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="data/cifar10", help="not below /tmp, which each host has for itself")
    parser.add_argument("--network", default="--network resnet --num-layers 20", metavar="OPTIONS")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr-step-epochs", default="6,9")
    parser.add_argument("--batch", type=int, default=32, help="samples of each worker's step")
    parser.add_argument("--every", type=float, default=20.0, help="s between two faults; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the faults, and of the training")
    parser.add_argument("--rate", default="1gbit", help="of each host's link (default %(default)s)")
    parser.add_argument("--folder", type=Path, help="where logs and audit stay; by default they are deleted")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with bed_of(HOSTS, options.rate, folder) as bed:
            found = Trial(bed, folder, options).run()
    versions = {name: installed(name) for name in ("dmltrain", "torch")}
    show({"trial": found, **facts("endurance.py", argv, versions)}, options.format, table)
    return 0 if found["exit_code"] == 0 and found["exact"] else 1


if __name__ == "__main__":
    sys.exit(main())
