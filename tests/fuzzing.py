"""Fuzzing of parsers with seeded mutations of valid inputs: no crash, no hang, and no more than 64 MiB of memory.

A test module describes a parser as a value `Fuzzed` and calls `survive("tests.data.test_fuzz:CIFAR10", part)`. That
forks a process (tests/forked_job.py) for a batch of inputs, which ends with status 1 at the first that breaks a rule:

- The parser returns, or raises one of the documented `errors`.
- It takes at most `cpu_seconds` of processor time.
- The process's peak of resident memory (VmHWM in /proc/self/status, read after each input) grows by at most MAX_GROWTH
  over what it has after all valid inputs were read once and all free memory was given back, so that no input uses any
  unseen. Addresses are limited to 1 GiB more than that (RLIMIT_AS).

An input is a function of its number and the valid inputs, so a failure can be repeated:

    python -m tests.fuzzing tests.data.test_fuzz:CIFAR10 --first 4711 --count 1

`--atheris` runs the same parser with mutations that follow the coverage (pip install atheris; its options come last):

    python -m tests.fuzzing tests.data.test_fuzz:CIFAR10 --atheris -max_total_time=600
"""

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.copied_tree import search_path
from tests.forked_job import forker

PLACE = "DMLTRAIN_TEST_FUZZING"  # a folder for files of the process that reads the inputs
INPUTS = "DMLTRAIN_TEST_INPUTS"  # how many inputs each parser gets; CI sets 1,000, `make test-all` a million
PREFIX = "dmltrain-fuzz-"
PART = 100_000  # inputs of one process at most
MAX_GROWTH = 64 << 20  # bytes
MAX_ADDRESSES = 1 << 30  # bytes
STUCK_SECONDS = 240.0  # for 1000 inputs: ends a process that is stuck in C, where no signal handler runs
ROOT = Path(__file__).parents[1]
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 31, 1 << 40, 1 << 62)
TEXT_NUMBERS = (b"0", b"-1", b"1e999", b"NaN", b"65536", b"4294967296", b"18446744073709551616", b"9" * 40)

Change = Callable[[random.Random, bytearray, "Fuzzed"], None]


@dataclass(frozen=True)
class Fuzzed:
    """A parser: `read(data)` returns or raises one of `errors`.

    golden: makes its valid inputs. words: parts of the format, which mutations insert. forms: a mutation reaches the
    parser through one of these functions, for example one that makes its checksum right again. A parser without
    `errors` reads everything.
    """

    read: Callable[[bytes], object]
    golden: Callable[[], Sequence[bytes]]
    errors: tuple[type[Exception], ...]
    words: tuple[bytes, ...] = ()
    forms: tuple[Callable[[bytes], bytes], ...] = (bytes,)
    cpu_seconds: float = 2.0  # for one input; a valid input takes a thousandth of that


@dataclass(frozen=True)
class Result:
    """`accepted` inputs were read, `refused` ones raised an error of that name; `mib` is the growth of the peak."""

    inputs: int
    accepted: int
    refused: dict[str, int]
    mib: float
    cpu_seconds: float


# -- tests ------------------------------------------------------------------------------------------------------------


def parts() -> list[int]:
    """For `parametrize`: the numbers of the processes that share a parser's inputs."""
    return list(range(-(-_inputs() // PART)))


def survive(name: str, part: int = 0) -> Result:
    """Run one part of the inputs of `name`, "module:NAME" of a Fuzzed. Raises AssertionError with the first failure."""
    count = min(PART, _inputs() - part * PART)
    code, said = command(name, part * PART, count)
    assert code == 0, f"{said[-6000:]}\nexit status {code}"
    result = Result(**json.loads(said.splitlines()[-1]))
    assert result.inputs == count
    assert result.accepted, f"{name}: every input was refused: {result}"
    assert result.refused or not find(name).errors, f"{name}: no input was refused: {result}"
    return result


def command(name: str, first: int, count: int) -> tuple[int | None, str]:
    """The exit code and the output of this module's command, in a forked process."""
    words = [__file__, name, "--first", str(first), "--count", str(count)]
    with tempfile.NamedTemporaryFile("r") as log, tempfile.TemporaryDirectory(prefix=PREFIX) as place:
        environment = {**os.environ, "PYTHONPATH": search_path(), PLACE: place}
        process = forker().fork(words, environment, Path(log.name), ROOT)
        try:
            return process.wait(), log.read()
        finally:
            process.kill()
            process.wait()


def folder() -> Path:
    """Where the process that reads inputs may have files. Who started it removes it, also if the process is killed."""
    return Path(os.environ.get(PLACE, "/nowhere"))


def _inputs() -> int:
    return int(os.environ.get(INPUTS, "500"))


# -- mutations --------------------------------------------------------------------------------------------------------


def mutant(fuzzed: Fuzzed, golden: Sequence[bytes], number: int) -> bytes:
    """Input `number`: a valid input with one to five changes, half of them with one."""
    chance = random.Random(number)
    data = bytearray(chance.choice(golden))
    for _ in range(min(5, 1 + int(chance.expovariate(1.0)))):
        chance.choice(CHANGES)(chance, data, fuzzed)
    if chance.random() < 0.05:  # the end of one and the start of another
        other = chance.choice(golden)
        data[chance.randint(0, len(data)) :] = other[chance.randint(0, len(other)) :]
    return chance.choice(fuzzed.forms)(bytes(data))


def _flip(chance: random.Random, data: bytearray, fuzzed: Fuzzed) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _byte(chance: random.Random, data: bytearray, fuzzed: Fuzzed) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _number(chance: random.Random, data: bytearray, fuzzed: Fuzzed) -> None:
    """Overwrite 1, 2, 4 or 8 bytes by a number at a limit, in either byte order."""
    size = chance.choice((1, 2, 4, 8))
    value = (chance.choice(NUMBERS) + chance.choice((-1, 0, 0, 1))) % (1 << 8 * size)
    place = chance.randint(0, max(0, len(data) - size))
    data[place : place + size] = value.to_bytes(size, chance.choice(("big", "little")))


def _cut(chance: random.Random, data: bytearray, fuzzed: Fuzzed) -> None:
    del data[chance.randint(0, len(data)) :]


def _remove(chance: random.Random, data: bytearray, fuzzed: Fuzzed) -> None:
    place = chance.randint(0, len(data))
    del data[place : place + chance.randint(1, 16)]


def _repeat(chance: random.Random, data: bytearray, fuzzed: Fuzzed) -> None:
    start = chance.randint(0, len(data))
    part = data[start : start + chance.choice((1, 8, 64, 512))]
    data[start:start] = part * chance.choice((1, 1, 2, 16))


def _move(chance: random.Random, data: bytearray, fuzzed: Fuzzed) -> None:
    """Copy a part over another place."""
    start, to = chance.randint(0, len(data)), chance.randint(0, len(data))
    part = data[start : start + chance.choice((1, 4, 16, 64))]
    data[to : to + len(part)] = part


def _insert(chance: random.Random, data: bytearray, fuzzed: Fuzzed) -> None:
    place = chance.randint(0, len(data))
    data[place:place] = chance.randbytes(chance.randint(1, 8))


def _word(chance: random.Random, data: bytearray, fuzzed: Fuzzed) -> None:
    """Insert a word of the format, or put it in the place of as many bytes."""
    word = chance.choice(fuzzed.words) if fuzzed.words else chance.randbytes(4)
    place = chance.randint(0, len(data))
    data[place : place + chance.choice((0, len(word)))] = word


def _digits(chance: random.Random, data: bytearray, fuzzed: Fuzzed) -> None:
    """Replace a number that is written as text."""
    start = next((place for place in _from(chance, len(data)) if data[place : place + 1].isdigit()), None)
    if start is not None:
        end = start
        while data[end : end + 1].isdigit():
            end += 1
        data[start:end] = chance.choice(TEXT_NUMBERS)


def _from(chance: random.Random, size: int) -> Iterator[int]:
    """Up to 64 places in turn, from a random one on."""
    start = chance.randrange(size) if size else 0
    return iter(range(start, min(size, start + 64)))


CHANGES: tuple[Change, ...] = (
    *(_flip, _flip, _byte, _byte, _number, _number, _cut),
    *(_remove, _repeat, _move, _insert, _word, _word, _digits),
)


# -- the process that reads them --------------------------------------------------------------------------------------


class _Hang(BaseException):
    """An input took too long; not an Exception, so that no parser catches it."""


class Broken(AssertionError):
    """An input broke a rule."""


def run(fuzzed: Fuzzed, first: int, count: int) -> Result:
    """Read the inputs from number `first` on. Raises Broken with the number of the first that breaks a rule."""
    golden = list(fuzzed.golden())
    for valid in golden:
        fuzzed.read(valid)  # raises where an input is not valid
    signal.signal(signal.SIGPROF, _too_long)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = peak()
    refused: Counter[str] = Counter()
    with _addresses(MAX_ADDRESSES):
        for number in range(first, first + count):
            if number % 1000 == 0:
                faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
            outcome = _read(fuzzed, mutant(fuzzed, golden, number), number)
            refused[outcome] += 1
            if peak() - before > MAX_GROWTH:
                grown = (peak() - before) >> 20
                raise Broken(f"input {number} took {grown} MiB; it ended with: {outcome or 'success'}")
    faulthandler.cancel_dump_traceback_later()
    used, accepted = resource.getrusage(resource.RUSAGE_SELF), refused.pop("", 0)
    return Result(count, accepted, dict(refused), (peak() - before) / 2**20, used.ru_utime + used.ru_stime)


def _read(fuzzed: Fuzzed, data: bytes, number: int) -> str:
    """The name of the documented error, or ''. Raises Broken."""
    signal.setitimer(signal.ITIMER_PROF, fuzzed.cpu_seconds)
    try:
        fuzzed.read(data)
        return ""
    except fuzzed.errors as error:
        return type(error).__name__
    except (Exception, _Hang) as error:
        raise Broken(f"input {number} ({len(data)} bytes, {data[:200]!r}...): {type(error).__name__}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_long(*_: Any) -> None:
    raise _Hang


def peak() -> int:
    """This process's peak of resident memory, in bytes. (getrusage's also counts its parent's, from before exec.)"""
    return _status(b"VmHWM:")


def _status(name: bytes) -> int:
    with open("/proc/self/status", "rb", buffering=0) as file:
        text = file.read(4096)
    start = text.index(name) + len(name)
    return int(text[start : text.index(b"kB", start)]) << 10


@contextlib.contextmanager
def _addresses(more: int) -> Iterator[None]:
    """Limit this process's addresses, so that a fault cannot take the machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status(b"VmSize:") + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def follow_coverage(fuzzed: Fuzzed, name: str, options: Sequence[str]) -> None:
    """Run atheris until it finds a failure or its options end it. Its corpus starts with the valid inputs."""
    import atheris

    corpus = ROOT / "build/fuzzing" / name.replace(":", ".")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, valid in enumerate(fuzzed.golden()):
        (corpus / f"golden-{number}").write_bytes(valid)

    def one(data: bytes) -> None:
        with contextlib.suppress(*fuzzed.errors):
            fuzzed.read(data)

    memory = f"-rss_limit_mb={(peak() + MAX_ADDRESSES) >> 20}"
    limits = [f"-artifact_prefix={corpus}/", memory, f"-timeout={fuzzed.cpu_seconds:.0f}"]
    atheris.Setup([sys.argv[0], *limits, *options, str(corpus)], one)
    atheris.Fuzz()


def find(name: str) -> Fuzzed:
    """The value NAME of "module:NAME"."""
    module, _, value = name.partition(":")
    found = getattr(importlib.import_module(module), value)
    assert isinstance(found, Fuzzed)
    return found


def main() -> int:
    with tempfile.TemporaryDirectory(prefix=PREFIX) as place:
        os.environ.setdefault(PLACE, place)
        return _main()


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="module:NAME of a Fuzzed")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--atheris", action="store_true", help="follow the coverage; further options are atheris's")
    options, others = parser.parse_known_args()
    if options.atheris:
        import atheris

        with atheris.instrument_imports(include=["dmltrain", "dmltrain_launch"]):
            fuzzed = find(options.name)
            for valid in fuzzed.golden():
                fuzzed.read(valid)  # which imports the rest
        follow_coverage(fuzzed, options.name, others)
        return 0
    try:
        result = run(find(options.name), options.first, options.count)
    except Broken as error:
        traceback.print_exception(error.__cause__)
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    from tests import fuzzing  # the module that descriptions import, not its copy named __main__

    sys.exit(fuzzing.main())
