"""Elastic jobs for tests, and what must hold after each of them, whatever happened."""

import json
import re
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dmltrain import checkpoint, npz
from dmltrain.audit.count import count
from dmltrain.audit.views_file import read
from dmltrain.backends.torch.backend import TorchBackend
from tests.forked_job import ForkedJob, forker

PROGRAMS = Path(__file__).parent / "programs"
AUDIT, PREFIX = ["--audit", "audit"], ["--model-prefix", "m"]
KILLED = -9


@pytest.fixture(name="forker", scope="session")
def make_forker():
    return forker()


def come(job, rank, *words):
    """Start a worker that joins the job."""
    command, environment = job.commands["worker-0"]
    name = f"worker-{rank}"
    own = {"DMLC_TASK_ID": str(rank), "DMLC_WORKER_ID": str(rank), "DMLTRAIN_JOIN": "1"}
    job.commands[name] = ([*command, *words], {**environment, **own})
    job.processes[name] = job.start(name)


def come_server(job, number):
    """Start the replacement of a server that has ended."""
    command, environment = job.commands[f"server-{number}"]
    name = f"server-{number}-{sum(each.startswith(f'server-{number}') for each in job.processes) + 1}"
    job.commands[name] = (command, {**environment, "DMLTRAIN_JOIN": "1"})
    job.processes[name] = job.start(name)


class Jobs:
    """Starts jobs of tests/programs/elastic.py."""

    def __init__(self, start_job, forker):
        self._start, self._forker = start_job, forker

    def start(self, faults, *options, workers=4, servers=2, elastic=1, env=None, program="elastic.py"):
        """`elastic`: as many workers at least; None: a plain job."""
        return self._start(
            PROGRAMS / program,
            faults,
            *options,
            workers=workers,
            servers=servers,
            env={**({} if elastic is None else {"DMLTRAIN_ELASTIC": str(elastic)}), **(env or {})},
            made=lambda folder: ForkedJob(folder=folder, forker=self._forker),
        )

    def survives(
        self,
        faults,
        *options,
        lost=None,
        code=KILLED,
        late=False,
        rounding="",
        in_replay="",
        schedulers=0,
        servers_lost=(),
        servers_come=(),
        **job,
    ):
        """Run a job with these faults, and the replay of it. The others than the members `lost` (default: those with
        faults of their own) and `servers_lost` end with 0; all checks of this module hold. `late`: some of these may be
        lost when all ops are made. `rounding`: faults that the replay has, too; `in_replay`: that it has besides.
        `schedulers`: how often the faults kill the scheduler. `servers_come`: the servers whose replacements come, each
        when the one before it has ended. Returns the job."""
        own = [each for each in faults.split(",") if each and "server/" not in each]
        lost = {int(each[0]) for each in own} if lost is None else lost
        named = (
            {**job, "env": {**job.get("env", {}), "DMLTRAIN_SCHEDULER_FILE": "scheduler.json"}} if schedulers else job
        )
        if servers_come:
            named = {**named, "env": {**named.get("env", {}), "DMLTRAIN_RESTART_SERVERS": str(len(servers_come))}}
        found = self.start(",".join(filter(None, (faults, rounding))), *PREFIX, *AUDIT, *options, **named)
        killed = [*replace_servers(found, servers_come), *replace_schedulers(found, schedulers)]
        codes = found.wait()
        dead = {f"worker-{member}" for member in lost} | {newest_server(found, number) for number in servers_lost}
        expected = {name: code if name in dead else 0 for name in codes}
        expected |= dict.fromkeys(killed, KILLED)
        assert codes == expected, found.outputs()
        each_sample_once(found)
        views = read(found.folder / "audit/views.json").views
        gone = set(views[0].members) - set(views[-1].members)
        assert gone <= lost if late else gone == lost, found.outputs()
        gone = set(views[0].servers) - set(views[-1].servers)
        assert gone <= set(servers_lost) if late else gone == set(servers_lost), found.outputs()
        both = ",".join(filter(None, (rounding, in_replay)))
        replay = self.start(both, *PREFIX, "--replay", found.folder / "audit/views.json", *options, **job)
        replay.succeed()
        same(found, replay, sorted(set(ranks(found)) - lost))
        return found


def newest_server(job, number):
    return [name for name in job.processes if name.startswith(f"server-{number}")][-1]


def replace_servers(job, numbers):
    """For each, wait for the end of the server with this number, and start its replacement, which joins in a later view
    than the one that begins without it. Returns the names of those ended."""
    ended = []
    for number in numbers:
        ended.append(newest_server(job, number))
        job.processes[ended[-1]].wait(120.0)
        wait_for_view_without(job, number, sum(name.startswith(f"server-{number}") for name in ended))
        come_server(job, number)
    return ended


def wait_for_view_without(job, number, times):
    """A view has begun after this server was lost so many times, or none can; or 10 s are over."""
    text = rf"(server {number} on [^\n]* was lost.*?){{{times}}}(\n[^\n]* view \d|no server is left)"
    deadline = time.monotonic() + 10.0
    while not re.search(text, job.output("scheduler-0"), re.DOTALL) and time.monotonic() < deadline:
        time.sleep(0.01)


def replace_schedulers(job, times):
    """So often, wait for the end of the scheduler, and start the next incarnation. Returns the names of those ended."""
    name, ended = "scheduler-0", []
    for incarnation in range(2, times + 2):
        put(job.folder / "scheduler.pid", str(job.processes[name].pid))
        job.processes[name].wait(120.0)
        ended.append(name)
        name = start_scheduler(job, incarnation)
    return ended


def start_scheduler(job, incarnation):
    """Start it, and tell all others where it is. Returns its name."""
    listening = socket.create_server(("127.0.0.1", 0))
    port, name = listening.getsockname()[1], f"scheduler-0-{incarnation}"
    command, environment = job.commands["scheduler-0"]
    own = {"DMLTRAIN_INCARNATION": str(incarnation), "DMLC_PS_ROOT_PORT": str(port)}
    own["DMLTRAIN_LISTEN_FD"] = str(listening.fileno())
    job.commands[name] = (command, {**environment, **own})
    job.processes[name] = job.start(name, inherited=(listening.fileno(),))
    listening.close()
    while not (job.folder / f"{name}.log").exists():
        time.sleep(0.005)
    put(job.folder / "scheduler.json", json.dumps({"incarnation": incarnation, "host": "127.0.0.1", "port": port}))
    return name


def put(path, text):
    """The file is whole at any moment."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


@pytest.fixture(name="jobs")
def make_jobs(start_job, forker):
    return Jobs(start_job, forker)


def ranks(job):
    return [int(name.removeprefix("worker-")) for name in job.processes if name.startswith("worker")]


def digests(job, members):
    return {digest(job, member) for member in members}


def digest(job, member):
    found = re.search(r"Final weights sha256=(\w+)", job.output(f"worker-{member}"))
    assert found, job.outputs()
    return found[1]


def each_sample_once(job):
    """In each epoch, by the audit."""
    found = count(job.folder / "audit")
    assert not found.problems, f"{found.problems}\n{job.outputs()}"
    epochs = read(job.folder / "audit/views.json").job.epochs
    assert [*found.times] == [*range(epochs)]
    assert all((times == 1).all() for times in found.times.values())


def same(job, replay, members):
    """All `members` have the same weights, validation and checkpoints in both."""
    assert len(digests(job, members) | digests(replay, members)) == 1, replay.outputs()
    assert len({validation(each, member) for each in (job, replay) for member in members}) == 1, replay.outputs()
    one, other = map(checkpoints, (job, replay))
    assert one.keys() == other.keys() and [*one]
    assert [name for name in one if one[name] != other[name]] == []
    assert not [*job.folder.glob(".*.part")], "a writer has left a file"


def of_all_servers(states):
    """Their arrays by name, however many they are."""
    arrays = {name: each for state in states for name, each in npz.read(state.numpy().tobytes()).items()}
    return {name: torch.from_numpy(np.array(arrays[name])) for name in sorted(arrays)}


def validation(job, member):
    return tuple(re.findall(r"Epoch\[(\d+)\] Validation-(\S+)=(\S+)", job.output(f"worker-{member}")))


def checkpoints(job):
    """What is in each file: all but the number of workers. A leader that a replay lets go writes a checkpoint before it
    learns of that, at the same time as the next one, or after it."""
    found = {path.name: TorchBackend().decode(checkpoint.read(path)) for path in sorted(job.folder.glob("m-*"))}
    for content in found.values():
        del content["circumstances"]["num_workers"]
        optimizer = content["state"]["optimizer"]
        optimizer.update(of_all_servers(optimizer.pop("servers", [])))
    return {name: TorchBackend().encode(content) for name, content in found.items()}
