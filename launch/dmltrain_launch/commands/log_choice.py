"""Find the log folder of a job and the logs in it, and select logs by --show. Writes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dmltrain_launch import LaunchError
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER
from dmltrain_launch.terminal.log_folder import QUEUED, RECORD

LISTED = 10  # jobs named in an error
AGENT = "agent"
LOG = re.compile(rf"({SCHEDULER}|{SERVER}|{WORKER})-(\d+)\.log|({AGENT})-(.+)\.log")
RESTART = re.compile(r"restart-(\d+)")
ORDER = (SCHEDULER, SERVER, WORKER, AGENT)


@dataclass(frozen=True)
class Source:
    """The writer of a log: a rank of a role, or the agent of a host."""

    role: str
    which: int | str

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key for the order of launch."""
        rank = self.which if isinstance(self.which, int) else 0
        return ORDER.index(self.role), rank, str(self.which)

    def __str__(self) -> str:
        return f"{self.role}-{self.which}"


def find(job: str, root: Path = Path("logs")) -> Path:
    """The log folder of `job`, a name below `root` or a path. LaunchError lists the known jobs, newest first."""
    for folder in (root / job, Path(job)):
        if (
            job
            and folder.is_dir()
            and (any(map(Path.is_file, (folder / RECORD, folder / QUEUED))) or any(_logs_in(folder)))
        ):
            return folder
    names = [record.parent.name for record in sorted(root.glob(f"*/{RECORD}"), key=_changed, reverse=True)]
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    known = f"known jobs: {', '.join(names[:LISTED])}{more}" if names else f"there are no jobs in {root}/"
    raise LaunchError(f"no job {job!r} in {root}/, and no folder of that name with a job's logs; {known}")


def _changed(path: Path) -> float:
    """The time of the last change; 0 if the file was just removed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _logs_in(folder: Path) -> Iterator[tuple[Source, Path]]:
    for name in os.listdir(folder):
        match = LOG.fullmatch(name)
        if match:
            source = Source(match[1], int(match[2])) if match[1] else Source(match[3], match[4])
            yield source, folder / name


def all_logs(folder: Path) -> Iterator[tuple[int, Source, Path]]:
    """(restart, source, path) for every log of the job."""
    yield from ((0, *each) for each in _logs_in(folder))
    for name in os.listdir(folder):
        match = RESTART.fullmatch(name)
        if match and (folder / name).is_dir():
            yield from ((int(match[1]), *each) for each in _logs_in(folder / name))


def selected(text: str, sources: Iterable[Source]) -> Callable[[Source], bool]:
    """`chosen`; LaunchError lists `sources` if a part of the text names none of them."""
    sources = set(sources)
    for item in text.split(",") if text else ():
        if not any(map(_test(item.strip()), sources)):
            logs = _listing(sources) or "not written yet"
            raise LaunchError(f"--show {text}: no log of {item.strip()!r}; the logs are {logs}")
    return chosen(text)


def chosen(text: str) -> Callable[[Source], bool]:
    """A predicate for --show: worker, worker:0, worker:0-3, agent:HOST, comma-separated; "" for all."""
    tests = [_test(item.strip()) for item in text.split(",")] if text else [lambda source: True]
    return lambda source: any(test(source) for test in tests)


def _test(item: str) -> Callable[[Source], bool]:
    role, colon, which = item.partition(":")
    ranks = re.fullmatch(r"(\d+)(?:-(\d+))?", which)

    def test(source: Source) -> bool:
        if source.role != role or not colon:
            return source.role == role
        if isinstance(source.which, str):
            return source.which == which
        return ranks is not None and int(ranks[1]) <= source.which <= int(ranks[2] or ranks[1])

    return test


def _listing(sources: set[Source]) -> str:
    """The sources as text: scheduler:0, worker:0-4, agent:h1."""
    words = []
    for role in ORDER:
        ranks = sorted(source.which for source in sources if source.role == role and isinstance(source.which, int))
        runs: list[list[int]] = []
        for rank in ranks:
            if runs and rank == runs[-1][1] + 1:
                runs[-1][1] = rank
            else:
                runs.append([rank, rank])
        words += [f"{role}:{first}" if first == last else f"{role}:{first}-{last}" for first, last in runs]
        words += sorted(
            f"{role}:{source.which}" for source in sources if source.role == role and isinstance(source.which, str)
        )
    return ", ".join(words)
