"""The faults of the matrix: each strikes a job that is in its phase, notes when, and what shows that it happened.

What the job waits for in a phase comes after the fault, or in a cut that heals.
"""

import re
import signal
import time
from collections.abc import Callable

from tests.cluster import cuts, host, network, sshd
from tests.cluster.cells import CUTS, PAIRS, VICTIMS
from tests.cluster.command import ip
from tests.cluster.layout import LOGIN
from tests.cluster.processes import Process, is_guest, send
from tests.cluster.trial import PATIENCE_SECONDS, TASKS, Trial

CUT_SECONDS = 4.2  # of a cut that is survived


def kill_process(trial: Trial) -> None:
    role, _, rank = VICTIMS[trial.cell.fault].partition("-")
    name = "h1" if role == "scheduler" else "h2"
    index = TASKS.index(f"{role}-{rank}")
    pid = trial.wait(lambda: re.search(rf"task={index}, pid=(\d+)", trial.heard("Started")), f"{role} {rank}'s start")
    if trial.dies_at_once:
        struck = trial.folder / "struck"
        trial.wait(struck.exists, "the victim's end")
        trial.struck = time.monotonic() - (time.time() - struck.stat().st_mtime)
        trial.outcome.pid, trial.outcome.happened = int(pid[1]), "it killed itself"
    else:
        kill(trial, trial.victim(name, int(pid[1])))


def kill(trial: Trial, victim: Process) -> None:
    trial.struck = time.monotonic()
    send(victim.pid, signal.SIGKILL)
    while is_guest(victim.pid) and time.monotonic() < trial.struck + PATIENCE_SECONDS:
        time.sleep(0.001)
    trial.outcome.happened = f"killed {victim}" if not is_guest(victim.pid) else ""


def kill_agent(trial: Trial) -> None:
    kill(trial, trial.agent())


def kill_session(trial: Trial) -> None:
    trial.agent()
    listener = sshd.listener(trial.bed.layout, trial.cell.host)
    everything = host.everything(trial.bed.layout, trial.cell.host)
    sessions = [each for each in everything if sshd.is_sshd(each) and each.pid != listener.pid]
    trial.struck = time.monotonic()
    for each in sessions:
        send(each.pid, signal.SIGKILL)
    trial.outcome.happened = f"killed {', '.join(map(str, sessions))}" if sessions else ""


def kill_sshd(trial: Trial) -> None:
    trial.agent()
    trial.struck = time.monotonic()
    sshd.kill(trial.bed.layout, trial.cell.host)
    trial.outcome.happened = "" if sshd.listener(trial.bed.layout, trial.cell.host) else "no sshd"


def lose_host(trial: Trial) -> None:
    trial.agent()
    trial.struck = time.monotonic()
    trial.lost.add(trial.cell.host)
    host.power_off(trial.bed.layout, trial.cell.host)
    trial.outcome.happened = "" if trial.bed.pid_1(trial.cell.host) else "the host is dead"


def cut(trial: Trial, name: str) -> None:
    trial.struck = time.monotonic()
    network.cut_off(trial.bed.layout, [name])
    state = network.link_state(trial.bed.layout, name)
    trial.outcome.happened = f"{name}'s link is {state}" if state == "cut off" else ""


def cut_link(trial: Trial) -> None:
    trial.agent()
    cut(trial, trial.cell.host)


def cut_pair(trial: Trial) -> None:
    trial.agent()
    (host, other), layout, fault = PAIRS[trial.cell.pair], trial.bed.layout, trial.cell.fault
    trial.struck = time.monotonic()
    if fault == "black hole":
        cuts.blackhole(layout, host, other)
        trial.outcome.happened = f"{host} has no way to {other}"
    else:
        large_only = fault != "silent drop"
        cuts.drop(layout, host, other, large_only=large_only)

        def dropped() -> bool:
            """Until the first large packet all that is sent arrives, so the fault is not there yet."""
            looked = time.monotonic()
            found = bool(cuts.dropped(layout, host) or cuts.dropped(layout, other))
            trial.struck = looked if large_only and not found else trial.struck
            return found

        trial.wait(dropped, "dropped packets")
        trial.outcome.happened = "packets are dropped"


def cut_launcher_off(trial: Trial) -> None:
    cut(trial, LOGIN)


def cut_and_heal(trial: Trial) -> None:
    cut(trial, trial.cell.host)
    if trial.cell.phase != "middle":
        trial.let_go()
    time.sleep(max(0.0, trial.struck + CUT_SECONDS - time.monotonic()))
    ip(trial.bed.layout.switch, f"link set {trial.cell.host} master {network.BRIDGE}")  # one command: it has to be soon
    trial.outcome.cut_seconds = time.monotonic() - trial.struck
    if trial.job.poll() is not None or network.link_state(trial.bed.layout, trial.cell.host) != "up":
        trial.outcome.happened = ""
    trial.let_go()


def signal_launcher(trial: Trial) -> None:
    number = signal.SIGINT if trial.cell.fault == "Ctrl-C" else signal.SIGKILL
    launcher = trial.bed.command_pid(trial.job)
    trial.struck = time.monotonic()
    send(launcher, number)
    trial.outcome.happened = f"{number.name} to {launcher}"


STRIKES: dict[str, Callable[[Trial], None]] = {
    **dict.fromkeys(VICTIMS, kill_process),
    **{"agent": kill_agent, "session": kill_session, "sshd": kill_sshd, "host": lose_host, "link": cut_link},
    "healing link": cut_and_heal,
    **dict.fromkeys(CUTS, cut_pair),
    **{"launcher killed": signal_launcher, "launcher cut off": cut_launcher_off, "Ctrl-C": signal_launcher},
}
