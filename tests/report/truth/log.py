"""A program's epochs -> a log: starts, workers, prefixes, colours, noise, encodings and line ends."""

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from tests.report.truth.known import Case, Print, Program, Start, Values, row

Stamp = Callable[[float], str]

MARKS = (  # of a worker, before each of its lines: mpirun, srun -l, mpiexec, pdsh, torchrun, dmltrain, containers
    *("[1,{}]<stdout>:", "[1,{}]<stderr>:", "[prterun-host-1@1,{}]<stdout>: ", "{}: ", "[{}] ", "node0{}: "),
    *("rank{}: ", "[rank{}]: ", "[default{}]:", "[worker-{}] ", "trainer-{}  | ", "[pod/job-worker-{}/main] "),
    *("job-worker-{} main ", "job-worker-{} {when}", "job-x7f{}-q9 main ", "ps_worker_{} | ", " {}: ", "[{}]<stdout>:"),
    *("[prterun-h-1@1,{}][h1:77]<stdout>: ", "Rank[{}] ", "Node[{}]: "),
)


def _moment(form: str) -> Stamp:
    def stamp(seconds: float) -> str:
        whole = int(seconds)
        clock = time.strftime(form, time.gmtime(whole))
        return clock.replace("MMM", f"{int(seconds * 1000) % 1000:03}").replace(
            "UUU", f"{int(seconds * 1e6) % 10**6:06}"
        )

    return stamp


_LOGGING: tuple[Stamp, ...] = (
    lambda seconds: "",
    lambda seconds: "INFO:root:",
    _moment("%Y-%m-%d %H:%M:%S,MMM "),
    _moment("%Y-%m-%d %H:%M:%S,MMM INFO "),
    _moment("%Y-%m-%dT%H:%M:%S.UUU+00:00 [train.py:77] "),
    _moment("\x1b[32m%Y-%m-%d %H:%M:%S,MMM\x1b[0m \x1b[1mINFO\x1b[0m "),
    _moment("[%d/%m/%Y %H:%M:%S INFO] "),
    _moment("[%m/%d/%Y %H:%M:%S INFO] "),
    _moment("%b %d %H:%M:%S gpu17 train[4711]: "),
    lambda seconds: "\x1b[1;34m[INFO]\x1b[0m ",
)
_KUBERNETES = _moment("%Y-%m-%dT%H:%M:%S.UUUZ ")
_WHOLE = _LOGGING[6:9]  # seconds
_GLOG = (_moment("I%m%d %H:%M:%S.UUU 27501 "), _moment("I%Y%m%d %H:%M:%S.UUU 27501 "))
_NONE: tuple[Stamp, ...] = (lambda seconds: "",)
PREFIXES = {"logging": _LOGGING, "glog": _GLOG, "none": _NONE}  # of a program's own lines
STAMPED = (*_LOGGING[2:8], *_GLOG)
NOISE = (
    "",
    "/usr/lib/python3/dist-packages/x.py:77: UserWarning: The parameter 'pretrained' is deprecated since 0.13",
    'Traceback (most recent call last):\n  File "x.py", line 3, in <module>\nOSError: [Errno 5] Input/output error',
    "[12:00:01] src/operator/nn/./cudnn/cudnn_algoreg-inl.h:97: Running performance tests to find the best algorithm",
    " 10%|#         | 1/10 [00:01<00:09,  1.00s/it]\r 50%|#####     | 5/10 [00:05<00:05,  1.00s/it]",
    "Größe des Datensatzes: 50000, learning rate is now 0.1",
    "loss 0.5 accuracy 0.25",
    "val_loss improved from inf to 0.8, saving model to best.h5",
)
ENCODINGS = (*("utf-8",) * 12, "utf-8-sig", "utf-16", "utf-16-le", "latin-1")


def _spans(random: Random, again: bool, resumes: bool) -> list[tuple[int, int, bool]]:
    """Of each start the first epoch, one more than the last, and whether it ends in the last one."""
    spans: list[tuple[int, int, bool]] = []
    first, more = 0, True
    while more:
        end = first + random.randint(1, 5)
        more = again and len(spans) < 3 and random.random() < 0.25
        spans.append((first, end, more and random.random() < 0.5))
        at_most = end - spans[-1][2]
        first = random.choice((0, 0, random.randint(0, at_most), at_most)) if resumes else 0
    return spans


def case(random: Random, program: Program) -> Case:
    """The log of `program`, whose version was drawn."""
    spans = _spans(random, program.again_and_again, program.resumes)
    log = _Log(random, program)
    for number, (first, end, killed) in enumerate(spans):
        log.add(
            first, end, killed and not (log.own and log.workers > 1), number > 0
        )  # of several one batch line counts
    data, encoding = log.encoded()
    where = "marks" if log.mark else "tags" if log.own else "neither marks nor tags"
    description = f"{spans}, {log.workers} workers with {where}, {encoding}"
    elapsed = log.prefix in STAMPED and program.elapsed and log.workers == 1
    return Case({program.name: data}, log.starts, program.first, description, elapsed)


class _Written(NamedTuple):
    """By a worker in a start. timed: epoch -> place of the print whose time is the epoch's."""

    prints: list[Print]
    rows: dict[int, Values]
    timed: dict[int, int]


class _Log:
    def __init__(self, random: Random, program: Program) -> None:
        self.random, self.program = random, program
        workers = 1 if not program.is_text or random.random() < 0.7 else random.randint(2, 3)
        self.own = bool(program.tag) and (workers > 1 or random.random() < 0.5)
        self.workers = min(workers, program.most_workers)
        self.mark = random.choice(MARKS) if self.workers > 1 and not self.own else ""
        if not self.mark and program.is_text and random.random() < 0.05:
            self.mark = random.choice(MARKS)
        self.prefix = random.choice(PREFIXES[program.prefixes if program.is_text else "none"])
        self.offset = program.first if program.first is not None else 0
        self.now = float(random.randint(1_000_000_000, 1_700_000_000))
        self.lines: list[str] = []
        self.starts: list[Start] = []

    def add(self, first: int, end: int, killed: bool, again: bool) -> None:
        """A start of all workers. again: it is not the first."""
        share = self.random.random() if killed else None
        numbers = [epoch * self.program.step + self.offset for epoch in range(first, end + 1)]
        written = [self._worker(worker, numbers, share, again) for worker in range(self.workers)]
        start = Start(numbers[0], [each.rows for each in written], cut=numbers[-2] if killed else None)
        moments = self._write(written)
        if self.workers == 1:
            start.times = {at: moments[place] for at, place in written[0].timed.items() if at in start.rows[0]}
        self.starts.append(start)
        self.now += self.random.choice((5.0, 86400.0))

    def _worker(self, worker: int, numbers: list[int], share: float | None, again: bool) -> _Written:
        """share: how much of its last epoch it writes before it is killed."""
        program = self.program
        program.begin()
        opening = program.again if again and program.again else program.opening
        made = _Written([Print(text.replace("{first}", str(numbers[0]))) for text in opening], {}, {})
        for at in numbers[:-1]:
            prints = [each for each in program.epoch(at) if each.tagged or not worker]
            if share is not None and at == numbers[-2]:
                prints = prints[: max(1, min(len(prints) - 1, 1 + int(share * (len(prints) - 1))))]
            if values := row(prints):
                made.rows[at] = values
            for each in prints:
                made.prints.append(each)
                if each.timed:
                    made.timed[at] = len(made.prints) - 1
        made.prints.extend(map(Print, program.closing(numbers[-1], made.rows) if share is None else ()))
        return made

    def _write(self, written: Sequence[_Written]) -> dict[int, float]:
        """Returns place -> time, for a single worker."""
        noise = (*NOISE, *self.program.noise) if self.program.is_text else ()
        moments: dict[int, float] = {}
        for worker, place, each in _interleaved(self.random, [one.prints for one in written]):
            steps = (0.0, 1.0, 20.0, 900.0) if self.prefix in _WHOLE else (0.001, 0.25, 20.0, 900.0)
            self.now += self.random.choice(steps)
            moments[place] = self.now
            while noise and self.random.random() < 0.1:
                self._marked(self.random.choice(noise), worker)
            tag = self.program.tag.format(worker) if self.own else ""
            text = each.text.replace("{tag}", tag) if "{tag}" in each.text else tag * each.tagged + each.text
            self._marked(self.prefix(self.now) + text, worker)
        return moments

    def _marked(self, text: str, worker: int) -> None:
        mark = self.mark.format(worker, when=_KUBERNETES(self.now))
        self.lines += [mark + line for line in text.split("\n")]

    def encoded(self) -> tuple[bytes, str]:
        ending = self.random.choice(("\n",) * 5 + ("\r\n",))
        text = ending.join(self.lines).replace("\r\r\n", "\r\n") + ("" if self.random.random() < 0.02 else ending)
        encoding = self.random.choice(ENCODINGS)
        return text.encode(encoding, "replace"), encoding


def _interleaved(random: Random, written: Sequence[list[Print]]) -> list[tuple[int, int, Print]]:
    """All prints with their worker and place, each worker's in order."""
    order = [worker for worker, prints in enumerate(written) for _ in prints]
    if random.random() < 0.8:
        order.sort(key=lambda worker: random.random())
    places = [0] * len(written)
    together = []
    for worker in order:
        together.append((worker, places[worker], written[worker][places[worker]]))
        places[worker] += 1
    return together
