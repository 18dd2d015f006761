"""views.json: the facts of an elastic job and all of its views. `--replay` makes a job go through them again.

    {"format": 1,
     "job": {"workers": 4, "seed": 3, "samples": 60000, "batch": 256, "epochs": 2, "network": "mlp", "data": "9c1f...",
      "each": 0, "kvstore": "dist_sync"},
     "views": [
      {"number": 1, "base": 0, "hosts": [[0, 1], [2, 3]], "servers": [0], "lost": [], "joined": [],
       "shares": [], "left": [], "behind": [], "lost_servers": [], "joined_servers": [], "hands_over": [],
       "kvstore": "dist_sync", "staleness": 0.0, "drains": false, "epoch": 0, "returned": []},
      {"number": 2, "base": 7, "hosts": [[0], [2, 3]], "servers": [0],
       "lost": [{"member": 1, "reason": "..."}], "joined": [], "shares": [96, 64, 96], "left": [],
       "behind": [], "lost_servers": [], "joined_servers": [], "hands_over": [],
       "kvstore": "dist_sync", "staleness": 0.0, "drains": false, "epoch": 0,
       "returned": [[1793, 1793], [1797, 1797]]}]}

`returned`: the positions of the epoch that the loss of a member returned, as ranges from the first to the last. They
are for readers only, because a replay computes them again. `servers` are for readers too: no result depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dmltrain.audit import fields
from dmltrain.base import bounded, whole_file
from dmltrain.base.errors import UserError
from dmltrain.data.assignment.ranges import Ranges
from dmltrain.kvstore import types
from dmltrain.kvstore.view import NEVER, Lost, LostServer, View

NAME, FORMAT = "views.json", 1
MOST_BYTES = 64 << 20
MOST_RANKS = 1 << 16  # workers that join later have ranks above those of the start
_FIELDS = (  # of a view
    "number",
    "base",
    "hosts",
    "servers",
    "lost",
    "joined",
    "shares",
    "left",
    "behind",
    "lost_servers",
    "joined_servers",
    "hands_over",
    "kvstore",
    "staleness",
    "drains",
    "epoch",
    "returned",
)


@dataclass(frozen=True)
class JobFacts:
    """What must be the same in a replay. The names of the fields are those of the file.

    workers: at the start. seed: of the options. samples: of an epoch. batch: samples of a step of all workers together.
    network: its name. data: the digest of the training data. each: if not 0, a step has so many samples for each member
    of a view, and not `batch`. kvstore: the name of its type.
    """

    workers: int
    seed: int
    samples: int
    batch: int
    epochs: int
    network: str
    data: str
    each: int = 0
    kvstore: str = "dist_sync"

    def together(self, view: View) -> bool:
        """Whether the members of this view make each step together."""
        return types.find(view.kvstore or self.kvstore).synchronous

    def size(self, members: int) -> int:
        """The samples of a step of `members` members."""
        return self.each * members or self.batch


@dataclass(frozen=True)
class EnteredView:
    """A view, and the epoch in which it was entered. returned: the positions of that epoch that are assigned again,
    because their workers are lost, as ranges (first, last); empty between epochs."""

    view: View
    epoch: int = 0
    returned: Ranges = ()


@dataclass(frozen=True)
class RecordedJob:
    """A job and all views that it has entered, from number 1 on."""

    job: JobFacts
    entered: tuple[EnteredView, ...]

    @property
    def views(self) -> tuple[View, ...]:
        return tuple(entered.view for entered in self.entered)

    @property
    def members(self) -> tuple[int, ...]:
        """All workers that have ever been in a view, in ascending order."""
        return tuple(sorted({member for view in self.views for member in view.members}))


# -- writing ----------------------------------------------------------------------------------------------------------


def write(folder: Path, recorded: RecordedJob) -> None:
    """Replace views.json in this folder. Raises UserError when it cannot be written."""
    try:
        whole_file.write(folder / NAME, encode(recorded))
    except OSError as error:
        raise UserError(
            f"--audit {folder}: {NAME} cannot be written: {error.strerror}; give a folder with room"
        ) from error


def encode(recorded: RecordedJob) -> bytes:
    """The file's content: one line for each view."""
    rows = ",\n  ".join(json.dumps(_row(entered)) for entered in recorded.entered)
    job = json.dumps(asdict(recorded.job))
    return f'{{"format": {FORMAT},\n "job": {job},\n "views": [\n  {rows}]}}\n'.encode()


def _row(entered: EnteredView) -> dict[str, object]:
    view = entered.view
    lost, left = ([{"member": gone.member, "reason": gone.reason} for gone in all_] for all_ in (view.lost, view.left))
    facts = {"number": view.number, "base": view.base, "hosts": view.hosts, "servers": view.servers, "lost": lost}
    servers = [{"number": lost_server.number, "reason": lost_server.reason} for lost_server in view.lost_servers]
    facts |= {
        "joined": view.joined,
        "shares": view.shares,
        "left": left,
        "behind": view.behind,
        "lost_servers": servers,
        "joined_servers": view.joined_servers,
        "hands_over": view.hands_over,
        "kvstore": view.kvstore,
        "staleness": view.staleness,
        "drains": view.drains,
    }
    return {**facts, "epoch": entered.epoch, "returned": entered.returned}


# -- reading ----------------------------------------------------------------------------------------------------------


def read(path: Path, option: str = "") -> RecordedJob:
    """The content of a file that `write` wrote. Raises UserError, which names `option` if it is given."""
    where = f"{option} {path}".strip()
    try:
        return parse(bounded.read(path, MOST_BYTES))
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}; the {NAME} of a job with --audit was expected") from error
    except ValueError as error:
        raise UserError(f"{where}: {error}: the file is damaged") from None


def parse(content: bytes) -> RecordedJob:
    """Raises ValueError, which says what is wrong."""
    document = fields.parsed(content, ("format", "job", "views"))
    fields.whole(document["format"], "its format", FORMAT, FORMAT + 1)
    job = _job(document["job"])
    rows = fields.items(document["views"], "views")
    recorded = RecordedJob(job, tuple(_entered(row, name, job) for name, row in rows))
    _check_first(recorded)
    for before, view in zip(recorded.views, recorded.views[1:], strict=False):
        _check_next(before, view)
    return recorded


def _job(value: Any) -> JobFacts:
    values = fields.fields(value, "job", [*JobFacts.__annotations__])
    least = {"workers": 1, "seed": 0, "samples": 1, "batch": 1, "epochs": 1, "each": 0}
    numbers = {name: fields.whole(values[name], name, low) for name, low in least.items()}
    kvstore = _kvstore(values["kvstore"], "kvstore")
    network, data = (fields.text(values[name], name) for name in ("network", "data"))
    return JobFacts(**numbers, network=network, data=data, kvstore=kvstore)


def _kvstore(value: Any, what: str) -> str:
    kvstore = fields.text(value, what)
    if kvstore not in types.TYPES:
        raise ValueError(f"{what} {kvstore!r} is none of {', '.join(types.TYPES)}")
    return kvstore


def _entered(value: Any, what: str, job: JobFacts) -> EnteredView:
    row = fields.fields(value, what, _FIELDS)
    number = fields.whole(row["number"], f"{what}: number", 1)
    what = f"view {number}"
    base, servers = fields.whole(row["base"], f"{what}: base"), fields.wholes(row["servers"], f"{what}: servers")
    hosts = fields.items(row["hosts"], f"{what}: hosts")
    members = tuple(fields.wholes(host, name, MOST_RANKS) for name, host in hosts)
    lost, left = (
        tuple(_lost(field, place) for place, field in fields.items(row[name], f"{what}: {name}"))
        for name in ("lost", "left")
    )
    epoch = fields.whole(row["epoch"], f"{what}: epoch")
    back = fields.items(row["returned"], f"{what}: returned")
    joined = fields.wholes(row["joined"], f"{what}: joined", MOST_RANKS)
    shares = _shares(row["shares"], f"{what}: shares", job.size(sum(map(len, members))))
    behind = fields.wholes(row["behind"], f"{what}: behind", MOST_RANKS)
    gone = fields.items(row["lost_servers"], f"{what}: lost_servers")
    lost_servers = tuple(_lost_server(each, name) for name, each in gone)
    came = fields.wholes(row["joined_servers"], f"{what}: joined_servers")
    hands = fields.wholes(row["hands_over"], f"{what}: hands_over", MOST_RANKS)
    kvstore = "" if row["kvstore"] == "" else _kvstore(row["kvstore"], f"{what}: kvstore")
    staleness = fields.number(row["staleness"], f"{what}: staleness")
    view = View(
        *(number, base, members, servers, NEVER, lost, joined, shares, behind, lost_servers, left, came, hands),
        *(kvstore, staleness, fields.flag(row["drains"], f"{what}: drains")),
    )
    return EnteredView(view, epoch, tuple(_range(each, name, job) for name, each in back))


def _lost(value: Any, what: str) -> Lost:
    row = fields.fields(value, what, ("member", "reason"))
    return Lost(fields.whole(row["member"], f"{what}: member"), fields.text(row["reason"], f"{what}: reason"))


def _lost_server(value: Any, what: str) -> LostServer:
    row = fields.fields(value, what, ("number", "reason"))
    return LostServer(fields.whole(row["number"], f"{what}: number"), fields.text(row["reason"], f"{what}: reason"))


def _shares(value: Any, what: str, size: int) -> tuple[int, ...]:
    shares = fields.wholes(value, what, size + 1)
    if shares and sum(shares) != size:
        raise ValueError(f"{what} are {sum(shares)} samples together, expected {size}")
    return shares


def _range(value: Any, what: str, job: JobFacts) -> tuple[int, int]:
    first, last = fields.wholes(value, what, job.samples, length=2)
    if first > last:
        raise ValueError(f"{what} is from {first} to {last}")
    return first, last


def _check_first(recorded: RecordedJob) -> None:
    if not recorded.entered:
        raise ValueError("it has no views")
    view, workers = recorded.views[0], recorded.job.workers
    is_first = (view.number, view.base, len(view.members)) == (1, 0, workers)  # a damaged file may have any number
    if not is_first or view.members != tuple(range(workers)) or view.lost:
        raise ValueError(f"its first view is not one of {workers} workers with number 1 and base 0")


def _check_next(before: View, view: View) -> None:
    """Views lose and gain members, and keep the order of the others."""
    if view.number != before.number + 1:
        raise ValueError(f"view {view.number} follows view {before.number}")
    if view.base < before.base:
        raise ValueError(f"view {view.number} has base {view.base} after base {before.base}")
    gone = set(before.members) - set(view.members)
    stayed = tuple(tuple(each for each in host if each not in view.joined) for host in view.hosts)
    for member in sorted(set(view.joined) & set(before.members)):
        raise ValueError(f"view {view.number}: worker {member} joins, who was a member before")
    for number in sorted(
        {lost_server.number for lost_server in view.lost_servers} & set(view.servers) - set(view.joined_servers)
    ):
        raise ValueError(f"view {view.number} has lost server {number}, and still has it")
    if gone >= set(before.members) or before.without(gone, view.base).hosts != tuple(filter(None, stayed)):
        raise ValueError(f"view {view.number} is not view {before.number} without some of its members")
    if not {each.member for each in (*view.lost, *view.left)} <= gone:
        raise ValueError(f"view {view.number} has lost members who still belong to it")


# -- a replay ---------------------------------------------------------------------------------------------------------


def check_same(recorded: RecordedJob, own: JobFacts, option: str) -> None:
    """Raises UserError, which begins with `option` and lists each different fact, unless the file is of such a job."""
    job = recorded.job
    names = [name for name in JobFacts.__annotations__ if _fact(job, name) != _fact(own, name)]
    if not names:
        return
    theirs, ours = (_listed([_FACTS[name].format(_fact(facts, name)) for name in names]) for facts in (job, own))
    fixes = dict.fromkeys(_FIXES[name].format(_option_value(job, name)) for name in names)
    raise UserError(
        f"{option}: it is of a job with {theirs}, this one has {ours}: start this job with {_listed([*fixes])}"
    )


def check_together(recorded: RecordedJob, option: str) -> None:
    """Raises UserError, which begins with `option`, if the recorded job had views in which workers made steps of their
    own."""
    changed = next((view for view in recorded.views if not recorded.job.together(view)), None)
    if changed:
        raise UserError(
            f"{option}: the recorded job had {changed.kvstore} from view {changed.number} on, with which no two runs "
            "have the same weights: give the views of a job that always had dist_sync"
        )


def check_ranks(recorded: RecordedJob, ranks: int, option: str) -> None:
    """Raises UserError, which begins with `option`, unless all workers of the file have ranks below `ranks`."""
    last = recorded.members[-1]
    if last >= ranks:
        raise UserError(
            f"{option}: worker {last} joined the recorded job, and this one has no more than {ranks} worker(s): start "
            f"its scheduler, servers and workers with DMLTRAIN_MAX_WORKERS={last + 1} (dmltrain-launch --elastic sets "
            "a number that is large enough)"
        )


_FACTS = {
    "workers": "{} worker(s)",
    "seed": "seed {}",
    "samples": "{} samples an epoch",
    "batch": "{} samples a step",
    "epochs": "{} epoch(s)",
    "network": "network {}",
    "data": "data {:.12}",
    "each": "--batch {}",
    "kvstore": "kvstore {}",
}
_FIXES = {
    "workers": "-n {}",
    "seed": "--seed {}",
    "samples": "the same --num-examples",
    "batch": "--batch-size {}",
    "epochs": "--num-epochs {}",
    "network": "--network {}",
    "data": "the same data",
    "each": "--batch {}",
    "kvstore": "--kv-store {}",
}


def _fact(job: JobFacts, name: str) -> object:
    """As a message shows it."""
    return ("per-worker" if job.each else "constant") if name == "each" else getattr(job, name)


def _option_value(job: JobFacts, name: str) -> object:
    return job.batch // job.workers if name == "batch" else _fact(job, name)


def _listed(texts: Sequence[str]) -> str:
    return " and ".join([*([", ".join(texts[:-1])] if texts[1:] else []), texts[-1]])
