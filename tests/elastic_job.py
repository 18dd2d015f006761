"""Elastic jobs for tests, and what must hold after each of them, whatever happened."""

import json
import re
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from dmltrain.audit.count import count
from dmltrain.audit.views_file import read
from dmltrain.backends.torch.backend import TorchBackend
from dmltrain.base import npz
from dmltrain.checkpoints import checkpoint
from dmltrain_launch.certificate import new
from dmltrain_launch.job.settings import Settings
from dmltrain_launch.run.planned.settings import request
from tests.forked_job import ForkedJob, forker
from tests.waiting import wait_for

PROGRAMS = Path(__file__).parent / "programs"
AUDIT, PREFIX = ["--audit", "audit"], ["--model-prefix", "m"]
KILLED = -9
SCRIPTS = ("elastic_script.py", "elastic_rates.py")  # whose workers import torch.compile when they make steps
COMPILER = "torch._dynamo"  # torch.compile's machinery, which takes as long to import as torch itself


@pytest.fixture(name="forker", scope="session")
def make_forker():
    return forker()


def start_like(job, name, other, *words, **environment):
    """Start another process like this one, with more words and environment."""
    command, before = job.commands[other]
    job.commands[name] = ([*command, *words], {**before, **environment})
    job.processes[name] = job.start(name)


def come(job, rank, *words):
    """Start a worker that joins the job."""
    own = {"DMLC_TASK_ID": str(rank), "DMLC_WORKER_ID": str(rank)}
    start_like(job, f"worker-{rank}", "worker-0", *words, DMLTRAIN_JOIN="1", **own)


def come_server(job, number):
    """Start the replacement of a server that has ended."""
    name = f"server-{number}-{sum(process.startswith(f'server-{number}') for process in job.processes) + 1}"
    start_like(job, name, f"server-{number}", DMLTRAIN_JOIN="1")


@dataclass(frozen=True)
class Row:
    """A job: what happens in it, and what is said in it and holds after it."""

    faults: str = ""  # of programs/elastic.py
    steps: str = "on workers"
    way: str = "default"
    options: str = ""
    workers: int = 3
    servers: int = 2
    elastic: int = 1  # as many workers at least
    env: str = ""  # NAME=VALUE, each without DMLTRAIN_ before it
    come: tuple[int, ...] = ()  # workers that join in addition
    come_after: str = ""  # as in `says`; at once, by default
    workers_come: tuple[tuple[int, str], ...] = ()  # workers whose replacements come, and the faults of these
    servers_come: tuple[int, ...] = ()  # as the workers, each when the one before it has ended
    asks: tuple[str, ...] = ()  # for these kvstores, and a staleness: each when the change before it is made
    codes: dict[str, int] = field(default_factory=dict)  # of workers that end otherwise than by kill -9
    late: bool = False  # some losses may happen when all ops are made
    rounding: str = ""  # faults that the replay has, too
    in_replay: str = ""  # and those that it has besides
    replay_options: str = ""  # likewise
    replayed: bool | None = None  # whether a replay has the same weights; None: see has_replay
    says: tuple[str, ...] = ()  # "process: pattern"; of any process: "any: pattern"
    silent: tuple[str, ...] = ()  # what no process says
    views: dict[str, list] = field(default_factory=dict)  # attribute -> its values, those that are not empty

    @property
    def loses_server(self) -> bool:
        return "server/" in self.faults

    @property
    def has_replay(self) -> bool:
        """No other job makes the steps of single workers, nor loses what a server had that made the steps."""
        if self.replayed is not None:
            return self.replayed
        return self.steps in ("on workers", "dist_local") or (self.steps == "on servers" and not self.loses_server)

    def victims(self, what: str) -> list[str]:
        """The names of the processes to which this happens."""
        found = []
        for fault in filter(None, self.faults.split(",")):
            member, *_, action = fault.strip().partition(" once ")[0].split(":")
            if "server/" in action and what in ("kill", "stop") and action.startswith("stop") == (what == "stop"):
                found.append(action.split()[-1].replace("/", "-"))
            elif action == what:
                found.append(f"worker-{member}")
        return found


COME = "once come"  # a fault happens when the scheduler has heard of a newcomer
ALL_COME = "once all"  # and of a server's replacement
STEPS = {  # who makes steps -> options
    "on workers": "",
    "on servers": "--update-on-kvstore 1 --mom 0.9",
    "dist_ssp": "--kv-store dist_ssp --staleness 1 --mom 0.9 --lr 0.02",
    "dist_async": "--kv-store dist_async --mom 0.9 --lr 0.02",
    "dist_local": "--kv-store dist_local --local-steps 3 --mom 0.9 --lr 0.02 --outer-momentum 0.5",
}
WAYS = {  # on the wire -> transport, DMLTRAIN_WIRE, options
    "default": ("auto", "", ""),
    "shared memory": ("shm", "", ""),
    "TCP": ("tcp", "", ""),
    "tls": ("tcp", "tls", ""),
    "auth": ("tcp", "auth", ""),
    "bf16": ("shm", "", "--gc-type bf16"),
    "int8": ("tcp", "", "--gc-type int8"),
    "2bit": ("shm", "", "--gc-type 2bit"),
    "topk": ("tcp", "", "--gc-type topk"),
}


class Jobs:
    """Starts jobs of tests/programs/elastic.py."""

    def __init__(self, start_job, forker, folder):
        self._start, self._forker, self._folder = start_job, forker, folder

    def start(self, faults, *options, workers=4, servers=2, elastic=1, env=None, program="elastic.py", asks=False):
        """`elastic`: as many workers at least; None: a plain job."""
        imports_compiler = {"float16", "--clip-gradient-norm"} & {*options} or program in SCRIPTS
        forking = forker("torch", COMPILER) if imports_compiler else self._forker
        return self._start(
            PROGRAMS / program,
            faults,
            *options,
            workers=workers,
            servers=servers,
            env={**({} if elastic is None else {"DMLTRAIN_ELASTIC": str(elastic)}), **(env or {})},
            asks=asks,
            made=lambda folder: ForkedJob(folder=folder, forker=forking),
        )

    def survives(self, faults, *options, **more):
        return self.run(Row(faults, options=" ".join(map(str, options)), **more))

    def run(self, row):
        """Run this job, and its replay, which has none of the faults. All processes end as their faults say, the others
        with 0, and all checks of this module hold. Returns the job."""
        options = [*PREFIX, *f"{STEPS[row.steps]} {WAYS[row.way][2]} {row.options}".split()]
        shape = {"workers": row.workers, "servers": row.servers}
        faults = ",".join(word.strip() for word in f"{row.faults},{row.rounding}".split(",") if word.strip())
        env = self._environment(row)
        more = env | additional_environment(row)
        job = self.start(faults, *options, *AUDIT, **shape, elastic=row.elastic, env=more, asks=bool(row.asks))
        ended = change(job, row)
        job.wait()
        check_ends(job, row, ended)
        each_sample_once(job)
        views = check_views(job, row)
        check_what_is_said(job, row)
        if row.has_replay:
            again = ["--replay", job.folder / "audit/views.json", *row.replay_options.split()]
            faults = ",".join(filter(None, (row.rounding, row.in_replay)))
            replay = self.start(faults, *options, *again, **shape, env=env)
            for rank in row.come:
                come(replay, rank)
            replay.succeed()
            if row.way in ("int8", "2bit", "topk") and row.loses_server:  # checkpoints have residuals of all servers
                assert len(of_all(job) | of_all(replay)) == 1, replay.outputs()
            else:
                same(job, replay, sorted(set.intersection(*(set(view.members) for view in views))))
                assert of_all(job) == of_all(replay), replay.outputs()
        return job

    def _environment(self, row):
        transport, wire, _ = WAYS[row.way]
        env = {"DMLTRAIN_TRANSPORT": transport, "DMLTRAIN_LEAVE_SECONDS": "120"}  # for a busy machine
        if not row.victims("scheduler"):  # the next one waits so long for those who are lost meanwhile
            env["DMLTRAIN_HEARTBEAT_TIMEOUT"] = "60"
        env |= of_words(row.env)
        if row.come:
            env.setdefault("DMLTRAIN_MAX_WORKERS", str(max(row.come) + 1))
        if wire:
            certificate = self._folder / "certificate"
            certificate.write_bytes(new()[0])
            env |= {"DMLTRAIN_WIRE": wire, "DMLTRAIN_CERTIFICATE_FILE": str(certificate)}
        return env


def of_words(text):
    return {f"DMLTRAIN_{name}": value for name, value in (word.split("=") for word in text.split())}


def additional_environment(row):
    """What the replay does not have."""
    env = {"DMLTRAIN_SCHEDULER_FILE": "scheduler.json"} if row.victims("scheduler") else {}
    if row.servers_come:
        env["DMLTRAIN_RESTART_SERVERS"] = str(len(row.servers_come))
    if row.victims("stop"):
        env["DMLTRAIN_HEARTBEAT_TIMEOUT"] = "6"
    return env


def change(job, row):
    """Let those come who come, and those go on who are stopped. Returns the names of the processes that have ended and
    were replaced."""
    for number, kvstore in enumerate(row.asks, 1):
        before = ("scheduler-0", f"change {number - 1} from view") if number > 1 else ("worker-0", "View 1")
        job.wait_for_line(*before)
        ask(job, number, *kvstore.split())
    if not row.come_after:
        for rank in row.come:
            come(job, rank)
    if COME in row.faults:
        job.wait_for_line("scheduler-0", "has come to join")
        (job.folder / "passed-come").touch()
    ended = [replace_worker(job, rank, faults) for rank, faults in row.workers_come]
    ended += [*replace_servers(job, row.servers_come), *replace_schedulers(job, len(row.victims("scheduler")))]
    if row.come_after:
        job.wait_for_line(*row.come_after.split(": ", 1))
        for rank in row.come:
            come(job, rank)
    if ALL_COME in row.faults:
        for coming in ("has come as a replacement", "has come to join"):
            job.wait_for_line("scheduler-0", coming)
        (job.folder / "passed-all").touch()
    for name in row.victims("stop"):
        survivor = next(each for each in ("worker-2", "worker-0") if each not in row.faults)
        job.wait_for_line(survivor, f"Removed from the job: {name.replace('-', ' ')}")
        job.processes[name].send_signal(signal.SIGCONT)
    return ended


def ask(job, number, kvstore, staleness=-1.0):
    """As `dmltrain job set` does."""
    job.agent.send(request(number, Settings(kvstore, float(staleness)), "me").encode())


def check_ends(job, row, ended):
    codes = {name: process.returncode for name, process in job.processes.items()}
    replaced = {f"server-{number}" for number in row.servers_come}
    killed = {*ended, *(name for name in row.victims("kill") if name not in replaced)}
    expected = dict.fromkeys(codes, 0) | dict.fromkeys(killed, KILLED) | dict.fromkeys(row.victims("stop"), 75)
    assert codes == expected | row.codes, job.outputs()
    assert not [name for name in codes if codes[name] != 1 and "Traceback" in job.output(name)], job.outputs()
    assert len(of_all(job)) == 1, job.outputs()
    averages = any(option in row.options for option in ("--ema-decay", "--swa-from"))
    assert len(of_all(job, "Their average")) == averages, job.outputs()
    assert "Train-accuracy" in job.outputs()


def check_views(job, row):
    """Those are in the last view who were not lost, or were replaced, and those who came."""
    views = read(job.folder / "audit/views.json").views
    lost = {*row.victims("kill"), *row.victims("stop"), *row.codes}
    left = set(row.victims("leave")) - lost
    back = {f"worker-{rank}" for rank, _ in row.workers_come} | {f"server-{number}" for number in row.servers_come}
    first = {f"worker-{rank}" for rank in (*range(row.workers), *row.come)}
    first |= {f"server-{number}" for number in range(row.servers)}
    last = {f"worker-{rank}" for rank in views[-1].members} | {f"server-{number}" for number in views[-1].servers}
    stay = first - ((lost | left) - back)
    assert stay <= last <= first if row.late else last == stay, job.outputs()
    seen = {f"worker-{each.member}" for view in views for each in view.left}
    assert left <= seen <= (left if row.codes else {*row.victims("leave")}), job.outputs()
    workers = {name for name in lost - seen if name.startswith("worker")}
    seen = {f"worker-{each.member}" for view in views for each in view.lost}
    assert seen <= workers if row.late else seen == workers, job.outputs()
    for rank in row.come:
        assert f"worker-{rank}" in lost or (job.folder / f"audit/commits-{rank}.jsonl").read_text(), "it makes no steps"
    for name, expected in row.views.items():
        assert shown(job, name) == expected, job.outputs()
    return views


def shown(job, attributes):
    """In each view: the values of several attributes, or of one where it is not empty."""
    first, *more = attributes.split()
    views = read(job.folder / "audit/views.json").views
    if more:
        return [tuple(getattr(view, each) for each in (first, *more)) for view in views]
    return [each for view in views if (each := getattr(view, first))]


def check_what_is_said(job, row):
    said = [say.split(": ", 1) for say in row.says]
    happens = {fault.split(":")[-1].split()[0] for fault in row.faults.split(",") if fault}
    for name in row.victims("stop"):
        missed = "" if name.startswith("server") else rf": {name.replace('-', ' ')} on \S+ missed heartbeats for \d+ s"
        said.append((name, f"removed from the job{missed}"))
    if happens == {"scheduler"}:
        said.append(("scheduler-0-2", "incarnation 2 of the scheduler goes on after view 1"))
    if not row.codes and happens & {"leave"} and happens <= {"leave", "until/after/invite/1"}:
        said += [each for name in row.victims("leave") for each in of_departure(job, name)]
    for name, pattern in said:
        output = job.outputs() if name == "any" else job.output(name)
        assert re.search(pattern, output), f"{name} does not say {pattern!r}\n{job.outputs()}"
    for text in row.silent:
        assert text not in job.outputs()


def of_departure(job, name):
    """What is said when this worker leaves, and nobody else is lost: by the scheduler, itself and the others."""
    worker = name.replace("-", " ")
    yield "scheduler-0", rf"\d{{4}}-\d\d-\d\d \S+ {worker} on \S+ leaves on purpose: SIGTERM\n"
    yield name, r"part has ended: it leaves the job on purpose \(SIGTERM\)"
    views = read(job.folder / "audit/views.json").views
    for rank in {*views[0].members} & {*views[-1].members}:
        yield f"worker-{rank}", f"Left the job on purpose: {worker}: SIGTERM"


def replace_worker(job, rank, faults, *words):
    """Start the replacement of this worker, with faults of its own, when the one before it has ended. Returns the name
    of that one."""
    before = [name for name in job.processes if re.fullmatch(rf"worker-{rank}(-\d+)?", name)]
    job.processes[before[-1]].wait(120.0)
    (python, program, _, *options), environment = job.commands[f"worker-{rank}"]
    name = f"worker-{rank}-{len(before) + 1}"
    job.commands[name] = ([python, program, faults, *options, *words], {**environment, "DMLTRAIN_JOIN": "1"})
    job.processes[name] = job.start(name)
    return before[-1]


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
    """A view has begun after this server was lost so many times, or none can."""
    text = rf"(server {number} on [^\n]* was lost.*?){{{times}}}(\n[^\n]* view \d|no server is left)"
    over = job.processes["scheduler-0"].poll
    wait_for(lambda: re.search(text, job.output("scheduler-0"), re.DOTALL) or over() is not None, job.outputs)


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
    own |= {"DMLTRAIN_LISTEN_FD": str(listening.fileno()), "DMLTRAIN_AGENT_FD": ""}
    job.commands[name] = (command, {**environment, **own})
    job.processes[name] = job.start(name, inherited=(listening.fileno(),))
    listening.close()
    put(job.folder / "scheduler.json", json.dumps({"incarnation": incarnation, "host": "127.0.0.1", "port": port}))
    return name


def put(path, text):
    """The file is whole at any moment."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


@pytest.fixture(name="jobs")
def make_jobs(start_job, forker, tmp_path):
    return Jobs(start_job, forker, tmp_path)


def ranks(job):
    return [int(name.removeprefix("worker-")) for name in job.processes if name.startswith("worker")]


def digests(job, members):
    return {digest(job, member) for member in members}


def of_all(job, what="Final weights"):
    """The final weights of all processes that have them, or their average."""
    names = [name for name in job.processes if name.startswith("worker")]
    return {found for name in names for found in re.findall(rf"{what} sha256=(\w+)", job.output(name))}


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


def ends(job, seconds=120.0, **codes):
    """All of its processes end well, but for those with other codes (worker_1=KILLED), and it used each sample once."""
    found = job.wait(seconds)
    assert found == dict.fromkeys(found, 0) | {name.replace("_", "-"): codes[name] for name in codes}, job.outputs()
    each_sample_once(job)


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
        optimizer["state"] = dict(sorted(optimizer["state"].items()))  # in order of the buckets that came
    return {name: TorchBackend().encode(content) for name, content in found.items()}
