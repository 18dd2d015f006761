"""A program's epochs -> a log: starts, workers, prefixes, colours, noise, encodings and line ends."""

import time
from collections.abc import Callable, Sequence
from random import Random

from tests.report.truth.known import Case, Print, Program, Start, Values, row

Stamp = Callable[[float], str]

MARKS = (  # of a worker, before each of its lines: mpirun, srun -l, mpiexec, pdsh, torchrun, dmltrain, containers
    *("[1,{}]<stdout>:", "[1,{}]<stderr>:", "[prterun-host-1@1,{}]<stdout>: ", "{}: ", "[{}] ", "node0{}: "),
    *("rank{}: ", "[rank{}]: ", "[default{}]:", "[worker-{}] ", "trainer-{}  | ", "[pod/job-worker-{}/main] "),
    *("job-worker-{} main ", "job-worker-{} {when}"),
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
    workers = 1 if not program.is_text or random.random() < 0.7 else random.randint(2, 3)
    own = program.tag and (workers > 1 or random.random() < 0.5)
    workers = min(workers, program.most_workers)
    mark = random.choice(MARKS) if workers > 1 and not own else ""
    if not mark and program.is_text and random.random() < 0.05:
        mark = random.choice(MARKS)
    prefix = random.choice(PREFIXES[program.prefixes if program.is_text else "none"])
    offset = program.first if program.first is not None else 0
    now = float(random.randint(1_000_000_000, 1_700_000_000))
    noise = (*NOISE, *program.noise) if program.is_text else ()
    lines: list[str] = []
    starts: list[Start] = []
    for number, (first, end, killed) in enumerate(spans):
        killed = killed and not (own and workers > 1)  # of several workers' batch lines one counts
        written, share = [], random.random()
        for worker in range(workers):
            program.begin()
            opening = program.again if number and program.again else program.opening
            prints = [Print(text.replace("{first}", str(first + offset))) for text in opening]
            rows: dict[int, Values] = {}
            timed: dict[int, int] = {}
            for epoch in range(first, end):
                at = epoch * program.step + offset
                of_epoch = program.epoch(at)
                if killed and epoch + 1 == end:
                    most = len(of_epoch) - 1
                    of_epoch = of_epoch[: min(most, 1 + int(share * most))]
                if values := row([each for each in of_epoch if each.tagged or not worker]):
                    rows[at] = values
                for each in of_epoch:
                    if not each.tagged and worker:
                        continue
                    prints.append(each)
                    if each.timed:
                        timed[at] = len(prints) - 1
            prints += [] if killed else map(Print, program.closing(end * program.step + offset, rows))
            written.append((prints, rows, timed))
        cut = (end - 1) * program.step + offset if killed and of_epoch else None
        start = Start(first * program.step + offset, [rows for _, rows, _ in written], cut=cut)
        starts.append(start)
        moments: dict[int, float] = {}
        for worker, place, each in _interleaved(random, [prints for prints, _, _ in written]):
            now += random.choice((0.0, 1.0, 20.0, 900.0) if prefix in _WHOLE else (0.001, 0.25, 20.0, 900.0))
            moments[place] = now
            while noise and random.random() < 0.1:
                lines += _marked(random.choice(noise), mark, worker, now)
            tag = program.tag.format(worker) if own else ""
            text = each.text.replace("{tag}", tag) if "{tag}" in each.text else tag * each.tagged + each.text
            lines += _marked(prefix(now) + text, mark, worker, now)
        if workers == 1:
            start.times = {epoch: moments[place] for epoch, place in written[0][2].items() if epoch in start.rows[0]}
        now += random.choice((5.0, 86400.0))
    ending = random.choice(("\n",) * 5 + ("\r\n",))
    text = ending.join(lines).replace("\r\r\n", "\r\n") + ("" if random.random() < 0.02 else ending)
    encoding = random.choice(ENCODINGS)
    data = text.encode(encoding, "replace")
    where = "marks" if mark else "tags" if own else "neither marks nor tags"
    description = f"{spans}, {workers} workers with {where}, {encoding}"
    stamped = prefix in STAMPED
    return Case({program.name: data}, starts, program.first, description, stamped and program.elapsed and workers == 1)


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


def _marked(text: str, mark: str, worker: int, now: float) -> list[str]:
    return [mark.format(worker, when=_KUBERNETES(now)) + line for line in text.split("\n")]
