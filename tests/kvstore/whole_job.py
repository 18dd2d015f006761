"""A whole job in this process: its scheduler, servers and workers, each on threads of its own. Some servers may say
that they are on another host, so that the workers' host sums for them."""

import socket
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace

from dmltrain.base.env import Environment
from dmltrain.kvstore.scheduler.process import SchedulerProcess
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.links.service import Service
from dmltrain.kvstore.server.process import ServerProcess
from dmltrain.kvstore.transport import host, link
from dmltrain.kvstore.transport.handshake import CONTROL, Caller
from dmltrain.kvstore.transport.message import encode
from dmltrain.kvstore.transport.message.job import Abort, Register, Shutdown, Start
from dmltrain.kvstore.worker.store import DistKVStore
from tests.waiting import SECONDS

NEVER = 3600.0  # s: a process of a lost job ends itself then


class PlainStep:
    """A step of gradient descent, in numpy; keeps the last gradient as its state."""

    def __init__(self, spec, key, value):
        if spec["name"] != "plain":
            raise ValueError(f"no optimizer {spec['name']}")
        self.last = value * 0

    def __call__(self, value, gradient, rate):
        if rate > 1.0:
            raise ValueError(f"a rate of {rate}, expected 1 at most")
        value -= (rate if rate >= 0 else 1.0) * gradient
        self.last[:] = gradient

    def state(self):
        return {"last": self.last}

    def load(self, state):
        self.last[:] = state["last"]


class FarServer:
    """A server that says that it is on another host. It sums only."""

    def __init__(self, environment):
        self.failed, self.core = [], ServerCore(environment.num_workers, wait_seconds=environment.wait_seconds)
        name = f"far server {environment.index}"
        self._service = Service(name, environment, self.core, None, self.failed.append)
        self._listening = link.listen("127.0.0.1")
        caller = Caller.new(environment.job, environment.key, "server", environment.index, "scheduler 0", CONTROL)
        self._control = link.connect((environment.root_host, environment.root_port), caller, SECONDS)
        register = Register("127.0.0.1", self._listening.getsockname()[1], "", "", "elsewhere")
        self._control.send(encode(register))

    def run(self):
        message = None
        while not isinstance(message, Shutdown | Abort):
            message = self._control.read_message(self._control.read_header())
            if isinstance(message, Start):
                self.core.workers.on_hosts(host.at_start(message))
                self._service.accept(self._listening)
        self._listening.close()
        return message.reason if isinstance(message, Abort) else ""


class RefusingServer(FarServer):
    """One that has gone already: its port refuses connections."""

    def __init__(self, environment):
        super().__init__(environment)
        self._listening.close()


class WholeJob:
    """`far` of the servers, the last ones, are elsewhere. `stores` are the workers', by rank, but for the first
    `outside`, which join by themselves. `ended()` waits for scheduler and servers and gives why they say the job was
    lost."""

    def __init__(self, kind="dist_sync", workers=2, servers=2, far=0, staleness=0.0, each=None, **options):
        make_step, outside = options.pop("make_step", PlainStep), options.pop("outside", 0)
        far_server = options.pop("far_server", FarServer)
        listening = socket.create_server(("127.0.0.1", 0))
        common = {"num_workers": workers, "num_servers": servers, "root_port": listening.getsockname()[1]}
        common |= {"job": "job", "key": b"key", "lost_seconds": 60.0, "wait_seconds": SECONDS, "probe": False}
        self.environment = Environment(**(common | options))
        self.each = each or {}  # what is different for a worker, by rank
        near = servers - far
        scheduler = SchedulerProcess(replace(self.environment, role="scheduler", listen_fd=listening.detach()))
        self._ends = [begun(scheduler.run)]
        self.servers = []
        for index in range(servers):
            own = replace(self.environment, role="server", index=index)
            self.servers.append(ServerProcess(own, make_step, NEVER) if index < near else far_server(own))
            self._ends.append(begun(self.servers[-1].run))
        self.starting = [begun(self._store, kind, staleness, rank) for rank in range(outside, workers)]

    def _store(self, kind, staleness, rank):
        own = replace(self.environment, role="worker", index=rank, **self.each.get(rank, {}))
        return DistKVStore(kind, staleness, own, NEVER)

    @property
    def stores(self):
        return [each.result(SECONDS) for each in self.starting]

    def all(self, call):
        """What `call(store)` returns on each worker, all at the same time. Raises what the first of them raises: the
        others may wait for it."""
        calls = [begun(call, store) for store in self.stores]
        for each in wait(calls, SECONDS, FIRST_EXCEPTION).done:
            each.result()
        return [call.result(SECONDS) for call in calls]

    def at_once(self, call, rank):
        """That on one worker, to be awaited by `result`."""
        return begun(call, self.stores[rank])

    def ended(self):
        return [end.result(SECONDS) for end in self._ends]

    def close(self):
        """However the test has ended."""
        for each in self.starting:
            if each.exception(SECONDS) is None:
                each.result().abort("the test is over")
        for each in self._ends:
            each.exception(SECONDS)
        DistKVStore.present = False


def begun(call, *words):
    """What `call` returns or raises, as a future. Its thread keeps no process alive."""
    future = Future()

    def run():
        try:
            future.set_result(call(*words))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
