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

"job" also has "iterations", "test_interval", "snapshot" and "local_steps" where they are not 0, and that of a training
program "options", such as {"--label-smoothing": "0.1"}.
`returned`: the positions of the epoch that the loss of a member returned, as ranges from the first to the last. They
are for readers only, because a replay computes them again. `servers` are for readers too: no result depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from dmltrain.audit.lines import Count, FromOne
from dmltrain.base import bounded, json_text, schema, whole_file
from dmltrain.base.errors import UserError
from dmltrain.data.assignment.ranges import Ranges
from dmltrain.kvstore import types
from dmltrain.kvstore.view import Lost, LostServer, View

NAME, FORMAT = "views.json", 1
MOST_BYTES = 64 << 20
MOST_RANKS = 1 << 16  # workers that join later have ranks above those of the start
# of a job: only those that are not 0 are written
_OPTIONS = ("iterations", "test_interval", "snapshot", "local_steps")
_SPARED = (*_OPTIONS, "options")  # and those that are not None
if TYPE_CHECKING:
    KVStore = str
    KVStoreOrNone = str
    Format = int
    Rank = int
    Clocks = float
else:
    KVStore, KVStoreOrNone = schema.choice(*types.TYPES), schema.choice(*types.TYPES, "")
    Format, Rank = schema.whole(FORMAT, FORMAT), schema.whole(0, MOST_RANKS - 1)
    Clocks = schema.number(0, schema.LARGEST, "a number, 0 or more")


@dataclass(frozen=True)
class JobFacts:
    """What must be the same in a replay. The names of the fields are those of the file.

    workers: at the start. seed: of the options. samples: of an epoch. batch: samples of a step of all workers together.
    network: its name. data: the digest of the training data. each: if not 0, a step has so many samples for each member
    of a view, and not `batch`. kvstore: the name of its type. iterations: if not 0, the run ends after so many steps,
    in the middle of its last epoch. test_interval, snapshot: after how many steps members stop for a test and for a
    snapshot; 0: they do not. local_steps: if not 0, each member makes so many steps between two averages of weights.
    options: others on which the weights depend, as on the command line, where they are not the defaults; None: not
    known, as of a script or in the file of an older version.
    """

    MAY_OMIT = True

    workers: FromOne
    seed: Count
    samples: FromOne
    batch: FromOne
    epochs: FromOne
    network: str
    data: str
    each: Count = 0
    kvstore: KVStore = "dist_sync"
    iterations: Count = 0
    test_interval: Count = 0
    snapshot: Count = 0
    local_steps: Count = 0
    options: Mapping[str, str] | None = None

    def together(self, view: View) -> bool:
        """Whether the members of this view make each step together."""
        return types.find(view.kvstore or self.kvstore).synchronous

    def samples_in(self, epoch: int) -> int:
        """The samples that the run uses in this epoch: its first positions."""
        steps = -(-self.samples // self.batch)
        return min(self.samples, ((self.iterations or self.epochs * steps) - epoch * steps) * self.batch)

    @property
    def own(self) -> int:
        """The samples of one member's step, in a job without --batch and shares."""
        return self.batch // self.workers

    @property
    def per_member(self) -> int:
        """See SyncAssignment."""
        return self.own * self.local_steps or self.each

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


# -- as the file has it -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gone:
    member: Count
    reason: str


@dataclass(frozen=True)
class _GoneServer:
    number: Count
    reason: str


@dataclass(frozen=True)
class _Row:
    """A View, but for `until`; `epoch` and `returned` of the EnteredView."""

    number: FromOne
    base: Count
    hosts: tuple[tuple[Rank, ...], ...]
    servers: tuple[Count, ...]
    lost: tuple[_Gone, ...]
    joined: tuple[Rank, ...]
    shares: tuple[Count, ...]
    left: tuple[_Gone, ...]
    behind: tuple[Rank, ...]
    lost_servers: tuple[_GoneServer, ...]
    joined_servers: tuple[Count, ...]
    hands_over: tuple[Rank, ...]
    kvstore: KVStoreOrNone
    staleness: Clocks
    drains: bool
    epoch: Count
    returned: tuple[tuple[Count, Count], ...]


@dataclass(frozen=True)
class _File:
    format: Format
    job: JobFacts
    views: tuple[_Row, ...]


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
    rows = b",\n  ".join(json_text.encode(_row(entered)) for entered in recorded.entered)
    known = vars(recorded.job).items()
    job = json_text.encode({name: value for name, value in known if value not in (0, None) or name not in _SPARED})
    return b'{"format": %d,\n "job": %b,\n "views": [\n  %b]}\n' % (FORMAT, job, rows)


def _row(entered: EnteredView) -> _Row:
    view = vars(entered.view)
    rows = {
        "lost": tuple(_Gone(gone.member, gone.reason) for gone in entered.view.lost),
        "left": tuple(_Gone(gone.member, gone.reason) for gone in entered.view.left),
        "lost_servers": tuple(_GoneServer(gone.number, gone.reason) for gone in entered.view.lost_servers),
        "epoch": entered.epoch,
        "returned": entered.returned,
    }
    return _Row(**{field.name: {**view, **rows}[field.name] for field in fields(_Row)})


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
    file = schema.read(_File, json_text.parse(content))
    recorded = RecordedJob(file.job, tuple(_entered(row, file.job) for row in file.views))
    _check_first(recorded)
    for before, view in zip(recorded.views, recorded.views[1:], strict=False):
        _check_next(before, view)
    return recorded


def _entered(row: _Row, job: JobFacts) -> EnteredView:
    size = job.size(sum(map(len, row.hosts)))
    if row.shares and sum(row.shares) != size:
        raise ValueError(f"view {row.number}: shares are {sum(row.shares)} samples together, expected {size}")
    for first, last in row.returned:
        if not first <= last < job.samples:
            raise ValueError(f"view {row.number}: returned has {first} to {last}, expected 0 to {job.samples - 1}")
    facts = {name: value for name, value in vars(row).items() if name not in ("epoch", "returned")}
    gone = {name: tuple(Lost(each.member, each.reason) for each in facts[name]) for name in ("lost", "left")}
    servers = tuple(LostServer(each.number, each.reason) for each in row.lost_servers)
    return EnteredView(View(**{**facts, **gone, "lost_servers": servers}), row.epoch, row.returned)


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
    names = [name for name in _FACTS if _fact(job, name) != _fact(own, name)]
    options = _different_options(job.options, own.options)
    if not (names or options):
        return
    theirs, ours = (
        _listed([*(_FACTS[name].format(_fact(facts, name)) for name in names), *_given(facts, options)])
        for facts in (job, own)
    )
    fixes = dict.fromkeys([*(_FIXES[name].format(_option_value(job, name)) for name in names), *_given(job, options)])
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
    **dict.fromkeys(_OPTIONS, "{}"),
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
    **dict.fromkeys(_OPTIONS, "{}"),
}


def _different_options(theirs: Mapping[str, str] | None, ours: Mapping[str, str] | None) -> list[str]:
    """Their names; none unless both are known."""
    if theirs is None or ours is None:
        return []
    return [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]


def _given(job: JobFacts, options: Sequence[str]) -> list[str]:
    known = job.options or {}
    return [f"{name} {known[name]}" if name in known else f"no {name}" for name in options]


def _fact(job: JobFacts, name: str) -> object:
    """As a message shows it."""
    if name in _OPTIONS:
        option = "--max-iter" if name == "iterations" else f"--{name.replace('_', '-')}"
        return f"{option} {value}" if (value := getattr(job, name)) else f"no {option}"
    return ("per-worker" if job.each else "constant") if name == "each" else getattr(job, name)


def _option_value(job: JobFacts, name: str) -> object:
    return job.batch // job.workers if name == "batch" else _fact(job, name)


def _listed(texts: Sequence[str]) -> str:
    return " and ".join([*([", ".join(texts[:-1])] if texts[1:] else []), texts[-1]])
