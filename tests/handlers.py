"""The tables in docs/protocol.md of what the scheduler does with each message, processes with those of the scheduler,
and a server with each frame, made from those by which they do it.

python -m tests.handlers        # writes them anew
"""

from collections.abc import Iterable
from pathlib import Path

from dmltrain.kvstore.scheduler.client import Control
from dmltrain.kvstore.scheduler.core import ALL_ROLES, HANDLERS
from dmltrain.kvstore.server.links import handlers as frames
from dmltrain.kvstore.server.process import ServerProcess
from dmltrain.kvstore.worker.elastic_membership import ElasticMembership
from dmltrain.kvstore.worker.membership import Membership

PAGE = Path(__file__).parents[1] / "docs/protocol.md"
PROCESSES = {
    "any process": Control,
    "server": ServerProcess,
    "worker": Membership,
    "worker, elastic jobs only": ElasticMembership,
}
BEGIN, END = "<!-- made by python -m tests.handlers: {} -->\n", "<!-- end -->\n"


def of_scheduler() -> Iterable[str]:
    yield "| message | from | the scheduler |"
    yield "| --- | --- | --- |"
    for message, handler in HANDLERS.items():
        senders = "any process" if handler.senders == ALL_ROLES else " or ".join(handler.senders)
        jobs = ", elastic jobs only" if handler.only_elastic else ""
        yield f"| `{message.op or message.kind.name}` | {senders}{jobs} | {handler.does} |"


def of_processes() -> Iterable[str]:
    yield "| message of the scheduler | to | the process |"
    yield "| --- | --- | --- |"
    for to, kind in PROCESSES.items():
        for message, told in kind.TOLD.items():
            yield f"| `{message.op or message.kind.name.lower()}` | {to} | {told.does} |"


def of_server() -> Iterable[str]:
    yield "| frame | from | to a relay as well | the server |"
    yield "| --- | --- | --- | --- |"
    for kind, handler in frames.HANDLERS.items():
        senders = ", ".join([" or ".join(handler.senders), *filter(None, [handler.jobs])])
        yield f"| {kind.name} | {senders} | {'yes' if handler.to_relay else 'no'} | {handler.does} |"


def with_tables(page: str) -> str:
    """The page with the tables of today between their marks."""
    for name, lines in (("scheduler", of_scheduler()), ("processes", of_processes()), ("server", of_server())):
        begin = BEGIN.format(name)
        before, rest = page.split(begin)
        page = before + begin + "\n" + "\n".join(lines) + "\n\n" + END + rest.split(END, 1)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
