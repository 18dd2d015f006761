"""The types of kvstores, and what `create` makes of them; a running job's changes between two steps or with a view."""

import itertools
import json
import math
import os
import queue
import re
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dmltrain import kvstore
from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore import READ, types
from dmltrain.kvstore.scheduler.actions import Log
from dmltrain.kvstore.scheduler.agent import Agent
from dmltrain.kvstore.scheduler.changes import ENDING, STARTING
from dmltrain.kvstore.scheduler.membership.kind_change import KindChange
from dmltrain.kvstore.scheduler.reports import ASKED, MADE, REFUSED, Slowest, Told, Viewed
from dmltrain.kvstore.transport.message.changes import Change
from dmltrain.kvstore.view import View
from dmltrain_launch.job.settings import Settings
from dmltrain_launch.run.planned.settings import request
from tests.kvstore.whole_job import WholeJob
from tests.waiting import SECONDS

MORE, SIZE = 3, 50_000  # steps after each change; elements
SPEC = {"name": "plain"}


class Asking:
    """A job whose worker 0 asks for changes as the scheduler's agent does, each MORE steps after the one before. It
    ends so many steps after the last."""

    def __init__(self, logged, wanted, **job):
        self._logged, self._wanted = logged, wanted
        self.agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.job = WholeJob(agent_fd=theirs.detach(), **job)

    def train(self, store):
        """Each worker's steps: what it has pulled after each, of which type, and after which steps it changed. Then the
        values at the end."""
        values, pulled, types, changed = np.zeros(SIZE, np.float32), [], [], []
        wanted = iter(self._wanted)
        store.init("w", values)
        store.pull("w", values)
        store.set_optimizer(SPEC)
        store.follow_changes(["w"], lambda wanted: "")
        store.barrier()  # who does not follow yet refuses
        for step in itertools.count(1):
            last = changed[-1] if changed else 0
            if store.rank == 0 and step == last + MORE and len(changed) < len(self._wanted):
                if changed:
                    self._logged.wait_for(f"change {len(changed)} after step ")
                self.ask(len(changed) + 1, *next(wanted))
            types.append(store.type)
            store.push("w", np.full(SIZE, -gradient(store.rank, step), np.float32))
            handle = store.pull("w", READ, wait=False)
            if store.between_steps(handle.wait):
                changed.append(step)
            handle.wait()
            pulled.append(float(handle.values[0][-1]))
            if len(changed) == len(self._wanted) and step == changed[-1] + MORE:
                break
        store.barrier()
        store.pull("w", values)
        store.close()
        return pulled, types, changed, values

    def ask(self, number, name, staleness):
        """Ask for the change, and wait until the scheduler has asked the workers."""
        self.agent.send(request(number, Settings(name, staleness), "a test").encode())
        self._logged.wait_for(f"change {number} is asked for by a test")


def gradient(rank, step):
    return 1 + rank + 10 * step


def total(workers, steps):
    return sum(gradient(rank, step) for rank in range(workers) for step in range(1, steps + 1))


@pytest.mark.parametrize(
    "first, wanted",
    [
        ("dist_ssp", [("dist_sync", -1.0), ("dist_ssp", 4.0)]),
        pytest.param("dist_sync", [("dist_async", -1.0), ("dist_sync", -1.0)], marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.thorough)])
def test_all_workers_change_after_the_same_step(logged, first, wanted, transport):
    found = Asking(logged, wanted, kind=first, staleness=3.0, transport=transport)
    results = found.job.all(found.train)
    logged.wait_for("change 2 after step ")
    assert found.job.ended() == [""] * 3
    (_, types, changed, _), (_, others, others_changed, _) = results
    assert types == others and changed == others_changed and len(changed) == 2
    names = [first, *(name for name, _ in wanted)]
    assert [*dict.fromkeys(types)] == [*dict.fromkeys(names)] and types[-1] == names[-1]
    for pulled, _, _, values in results:
        assert (values == total(2, len(types))).all()
        for step, (value, name) in enumerate(zip(pulled, types, strict=True), 1):
            assert name != "dist_sync" or value == total(2, step)
    now = [name + (" staleness=4" if name == "dist_ssp" else "") for name, _ in wanted]
    before = [f"kv_store={each}" for each in (first + " staleness=3" * (first == "dist_ssp"), now[0])]
    for step, after, earlier in zip(changed, now, before, strict=True):
        line = f"after step {step} of this job: kv_store={after} (before: {earlier}); asked for by a test"
        assert logged.text.count(line) == 2
    assert f"change 1 after step {changed[0]} of all workers: kv_store={now[0]}\n" in logged.text


def test_what_a_worker_refuses_is_said_and_changes_nothing(logged):
    """Also what a program cannot do that pushes by itself."""
    found = Asking(logged, [], kind="dist_async", staleness=np.inf, workers=1, servers=1)
    (store,) = found.job.stores
    found.ask(1, "dist_ssp", -1.0)
    logged.wait_for("change 1 is refused: this program does not train with the optimizer on the servers")
    store.init("w", np.zeros(4, np.float32))
    store.set_optimizer(SPEC)
    store.follow_changes(["w"], lambda wanted: "")
    found.ask(2, "dist_sinc", -1.0)
    logged.wait_for("change 2 is refused: unknown kvstore 'dist_sinc'")
    assert not store.between_steps(lambda: None) and store.type == "dist_async"
    store.close()
    assert found.job.ended() == [""] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("first, then", [("dist_sync", "dist_async"), ("dist_async", "dist_sync")])
def test_a_scripts_gradients_are_weighed_by_the_kvstore_of_their_step(logged, first, then):
    """The mean of a step of all workers, and the whole gradient of a step of one; momentum goes on."""
    import torch

    from dmltrain.backends.torch.server_optimizer import SliceOptimizer
    from tests.connected import connected

    staleness = np.inf if first == "dist_async" else 0.0
    found = Asking(logged, [], kind=first, staleness=staleness, servers=1, make_step=SliceOptimizer)

    def train(store):
        model = torch.nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = connected(model, inner, store, update_on_kvstore=True)
        steps = {"dist_sync": 0, "dist_async": 0}
        store.barrier()  # who does not follow yet refuses
        while steps[then] < MORE:
            if store.rank == 0 and steps[first] == MORE and not steps[then]:
                found.ask(1, then, -1.0)
            steps[store.type] += 1
            optimizer.zero_grad()
            model(torch.full((1, 1), 1.0 + store.rank)).sum().backward()
            optimizer.step()
        optimizer.settle()  # all pushes are in the weights
        store.barrier()
        optimizer.synchronize()
        store.close()
        return steps, float(model.weight.detach())

    results = found.job.all(train)
    assert found.job.ended() == [""] * 2
    (steps, weight), (others, other) = results
    assert steps == others and weight == other
    assert weight == -(1.5 * steps["dist_sync"] + 3.0 * steps["dist_async"])


SSP = View(1, 0, ((0, 1),), (0,), kvstore="dist_ssp", staleness=2.0)
SYNC = replace(SSP, kvstore="dist_sync", staleness=0.0)


def change(kv_store="", staleness=-1.0, number=1):
    return Change(number, kv_store, staleness, "a test")


def refused(log, number=1):
    assert log[0] == Log(f"change {number} is asked for by a test", Told(number, ASKED))
    (said,) = log[1:]
    why = said.text.removeprefix(f"change {number} is refused: ")
    assert said.report == Told(number, REFUSED, why)
    return why


@pytest.mark.parametrize(
    "asked, kvstore, staleness, shown",
    [
        (change(staleness=0.0), "dist_ssp", 0.0, "kv_store=dist_ssp staleness=0"),
        (change("dist_async"), "dist_async", 0.0, "kv_store=dist_async"),
        (change("dist_ssp", 7.0), "dist_ssp", 7.0, "kv_store=dist_ssp staleness=7"),
    ],
)
def test_it_comes_with_the_next_view_and_with_no_other(asked, kvstore, staleness, shown):
    found = KindChange()
    assert len(found.ask(asked, SSP, ends=False)) == 1 and found.request.change
    view = found.next_view(SSP, SSP.without([1], 5), between=False, drained=False)
    assert (view.number, view.members, view.kvstore, view.staleness) == (2, (0,), kvstore, staleness)
    assert found.begins(view) == [Log(f"change 1 from view 2 on: {shown}", Told(1, MADE, shown, "from view 2 on"))]
    after = view.without([], 6)
    assert found.next_view(view, after, between=True, drained=False) == after
    assert (after.kvstore, after.staleness) == (kvstore, staleness)
    assert not found.request.change and found.begins(after) == []


@pytest.mark.parametrize(
    "asked, view, ends, why",
    [
        (change(staleness=1.0), None, False, STARTING),
        (change(staleness=1.0), SSP, True, ENDING),
        (change("dist_ssp", 2.0), SSP, False, "kv_store=dist_ssp staleness=2 is what the job has"),
        (change("dist_sync"), SYNC, False, "kv_store=dist_sync is what the job has already"),
        (change(staleness=1.0), replace(SSP, kvstore="", staleness=0.0), False, "it is not known what kvstore"),
    ],
)
def test_what_cannot_change_is_refused_at_once(asked, view, ends, why):
    found = KindChange()
    assert why in refused(found.ask(asked, view, ends)) and not found.request.change


def test_one_at_a_time_and_none_after_the_last_view():
    found = KindChange()
    found.ask(change(staleness=1.0), SSP, ends=False)
    assert refused(found.ask(change(staleness=3.0, number=2), SSP, False), 2).startswith("change 1 is not made yet")
    assert found.cancel() == [Log(f"change 1 is refused: {ENDING}", Told(1, REFUSED, ENDING))] and found.cancel() == []


@pytest.fixture
def agent():
    """An agent's end of its connection with a scheduler, the scheduler's end, and what that is asked for."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked = queue.SimpleQueue()
    found = Agent(theirs.detach(), asked.put)
    yield ours, found, asked
    found.close()
    ours.close()


def test_what_is_no_change_is_ignored_and_the_next_one_is_made(agent, logged):
    ours, _, asked = agent
    wanted = {"op": "change", "number": 1, "kv_store": "", "staleness": 1.0, "by": "me", "after": 0}
    for wrong in ({**wanted, "after": 7}, {**wanted, "number": 0}, {**wanted, "by": "x" * 70_000}, {"op": "bye"}, []):
        ours.send(json.dumps(wrong).encode())
    ours.send(json.dumps(wanted).encode())
    assert asked.get(timeout=SECONDS) == Change(1, "", 1.0, "me") and asked.empty()
    assert logged.text.count("ignored a message of the agent: ") == 5


def test_a_scheduler_reports_in_order_and_goes_on_without_its_agent(agent, logged):
    ours, scheduler, _ = agent
    scheduler.report(Told(1, ASKED))
    scheduler.report(Viewed(1, tuple(range(20_000))))
    scheduler.report(Slowest(1, 5.0))
    found = [json.loads(ours.recv(1 << 16)) for _ in range(2)]
    assert [each["op"] for each in found] == ["change", "slowest"]
    assert "the launcher is not told of a 'view': the message has 1" in logged.text
    ours.close()
    for _ in range(3):
        scheduler.report(Slowest(1, 5.0))
    Agent(None, pytest.fail).report(Slowest(1, 5.0))


def test_another_file_is_no_connection_with_an_agent(tmp_path):
    with open(tmp_path / "file", "w") as file, socket.create_server(("127.0.0.1", 0)) as listening:
        for number in (file.fileno(), listening.fileno(), 10_000):
            with pytest.raises(UserError, match=f"DMLTRAIN_AGENT_FD={number} is not a connection with an agent: "):
                Agent(number, pytest.fail)
            assert number == 10_000 or os.fstat(number), "it stays open"


ROOT = Path(__file__).parents[2]


def test_the_names_of_0_4_keep_their_meaning():
    names = dict.fromkeys(["local", "device"], "local")
    names |= dict.fromkeys(["dist_sync", "dist_device_sync", "dist_sync_device"], "dist_sync")
    names |= {"dist_async": "dist_async", "dist_async_device": "dist_async", "dist_ssp": "dist_ssp"}
    assert names.items() <= kvstore.TYPES.items()


@pytest.mark.parametrize(
    "name, given, bound",
    [
        ("local", None, 0.0),
        ("dist_device_sync", None, 0.0),
        ("dist_async_device", None, math.inf),
        ("dist_ssp", None, 3.0),
        ("dist_ssp", 0, 0.0),
        ("dist_ssp", 7, 7.0),
    ],
)
def test_bound_on_staleness(name, given, bound):
    assert types.find(name).bound(given) == bound


@pytest.mark.parametrize(
    "name, given, message",
    [
        ("dist_async", 3, "staleness is an option of kvstore dist_ssp; this is dist_async"),
        *(("dist_ssp", given, f"staleness {given!r}: expected 0 or more") for given in (-1, math.nan, "4", True)),
    ],
)
def test_an_invalid_bound_is_explained(name, given, message):
    with pytest.raises(UserError, match=re.escape(message)):
        types.find(name).bound(given)


@pytest.mark.parametrize(
    "name, on_workers, on_servers, sums, together, factors, elastic",
    [
        ("local", True, False, False, True, False, False),
        ("dist_sync", True, True, True, True, True, True),
        ("dist_async", False, True, False, False, False, True),
        ("dist_ssp", False, True, False, False, False, True),
        ("dist_local", True, False, True, False, False, True),
    ],
)
def test_where_the_optimizer_runs_and_what_is_common(name, on_workers, on_servers, sums, together, factors, elastic):
    kind = types.find(name)
    assert kind.steps_on_servers(False) is kind.needs_server_optimizer is not on_workers
    assert kind.steps_on_servers(True) is on_servers
    assert kind.sums_in_host is sums, "only synchronous workers are summed in their host"
    assert kind.steps_together is together and kind.takes_factors is factors
    assert kind.can_be_elastic is elastic


def test_averages_have_defaults_of_which_each_can_be_changed():
    kind, defaults = types.find("dist_local"), types.find("dist_local").local_steps
    assert kind.averaging() == defaults
    assert kind.averaging(7) == replace(defaults, steps=7)
    assert kind.averaging(None, 0.5) == replace(defaults, outer_lr=0.5)
    assert kind.averaging(None, None, 0.25) == replace(defaults, outer_momentum=0.25)
    assert all(each.averaging() is None for each in types.TABLE if each is not kind)


@pytest.mark.parametrize(
    "name, option, value, expected",
    [
        ("dist_sync", "local_steps", 5, None),
        ("local", "outer_lr", 1.0, None),
        ("dist_ssp", "outer_momentum", 0.0, None),
        *(("dist_local", "local_steps", value, "a whole number of steps, at least 1") for value in (0, 2.5, True)),
        *(("dist_local", "outer_lr", value, "a number above 0") for value in (0.0, math.nan, math.inf)),
        *(("dist_local", "outer_momentum", value, "a number from 0 to below 1") for value in (1.0, -0.1, math.nan)),
    ],
)
def test_averages_that_cannot_be_are_explained(name, option, value, expected):
    said = f"{value}: expected {expected}" if expected else f"is an option of kvstore dist_local; this is {name}"
    with pytest.raises(UserError, match=re.escape(f"{option} {said}")):
        types.find(name).averaging(**{option: value})


def test_no_code_compares_the_names_of_types():
    compared = re.compile(r"""(==|!=|\bin\b|startswith)\s*\(?\s*["'](dist|local|device)""")
    for path in (ROOT / "dmltrain").rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not compared.search(line), f"{path}:{number}: ask KVStore.kvstore_type: {line.strip()}"


ALONE = Environment()
LAUNCHED = Environment(launched=True, num_workers=2)


@pytest.mark.parametrize(
    "kind, options, environment, message",
    [
        ("dist", {}, ALONE, "local, device, dist_sync"),
        ("dist_sync", {}, ALONE, "dmltrain-launch -n WORKERS"),
        ("dist_sync", {}, LAUNCHED, "at least one server, .*-s 0"),
        ("dist_sync", {"transport": "udp"}, LAUNCHED, "transport='udp': .* auto, tcp, shm"),
        ("dist_sync", {"host_sum": "on"}, LAUNCHED, "host_sum='on': .* auto, off"),
        ("dist_sync", {"server_shares": "link"}, LAUNCHED, "server_shares='link': .* equal, links"),
        ("dist_sync", {"staleness": 3}, LAUNCHED, "staleness is .* dist_ssp"),
        ("dist_local", {"backend": "mxnet"}, LAUNCHED, "dist_local: MXNet .* local, "),
        ("dist_ssp", {"backend": "mxnet"}, LAUNCHED, "MXNet .* local, dist_sync, dist_async"),
    ],
)
def test_mistakes_are_explained(kind, options, environment, message):
    with pytest.raises(UserError, match=message):
        kvstore.create(kind, environment=environment, **options)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_single_worker_sums_its_devices(kind):
    kv = kvstore.create(kind, environment=ALONE)
    kv.init(["a", "b"], [np.zeros(2, np.float32), np.ones((2, 2), np.float32)])
    kv.push("a", [np.array([1, 2], np.float32), np.array([10, 20], np.float32)])
    outs = [np.zeros(2, np.float32), np.zeros(2, np.float32)]
    kv.pull("a", outs)
    kv.pull("b", square := np.zeros((2, 2), np.float32))
    assert [out.tolist() for out in (*outs, square)] == [[11, 22], [11, 22], [[1, 1], [1, 1]]]


def test_an_optimizer_in_the_local_store_and_its_state(tmp_path):
    stores = []
    for _ in range(2):
        kv = kvstore.create("local", environment=ALONE)
        kv.init("w", np.zeros(3, np.float32))
        kv.set_optimizer({"name": "sgd", "lr": 0.5, "momentum": 0.9})
        stores.append(kv)
    first, second = stores
    gradient, out = np.ones(3, np.float32), np.zeros(3, np.float32)
    first.pushpull("w", gradient, out)
    assert out.tolist() == [-0.5] * 3
    first.save_optimizer_states(str(tmp_path / "states"))
    second.push("w", gradient)
    second.load_optimizer_states(str(tmp_path / "states"))
    for kv in stores:
        kv.pushpull("w", gradient, out)
        assert out.tolist() == pytest.approx([-0.5 - 0.5 * 1.9] * 3)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda kv: kv.set_optimizer({"name": "magic"}), "unknown optimizer 'magic'"),
        (lambda kv: kv.set_optimizer({"name": "sgd", "lr": 0.1, "speed": 3}), "sgd takes lr, momentum"),
        (lambda kv: kv.set_optimizer({"name": "sgd", "lr": "fast"}), "lr='fast': expected a finite number"),
        (lambda kv: kv.push("x", np.zeros(1, np.float32)), "'x' was not declared: call init first"),
        (lambda kv: kv.init(["a", "b"], [np.zeros(1, np.float32)]), "2 keys but 1 values"),
        (lambda kv: kv.init("a", np.zeros(1, np.int64)), "float32 or float64, .* int64"),
        (lambda kv: kv.push("x", np.zeros(1, np.float32), rate=float("nan")), "rate is nan, expected a finite number"),
        (lambda kv: kv.set_gradient_compression({"type": "2bit"}), "compression '2bit' is not available"),
    ],
)
def test_wrong_calls_are_explained(call, message):
    kv = kvstore.create("local", environment=ALONE)
    kv.init("w", np.zeros(3, np.float32))
    with pytest.raises(UserError, match=message):
        call(kv)
