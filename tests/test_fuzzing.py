"""The fuzzer finds what it looks for: an undocumented error, a hang, memory; and repeats an input by its number."""

import pytest

from tests import fuzzing
from tests.fuzzing import Fuzzed, find, mutant


def _text(data: bytes) -> None:
    """A parser with three faults, each behind a byte that mutations find."""
    if data[:1] == b"\x80":
        raise KeyError("undocumented")
    if not data.startswith(b"golden"):
        raise ValueError("documented")


def _hungry(data: bytes) -> None:
    if len(data) < 5:
        bytearray(100 << 20)
    if data != b"golden":
        raise ValueError


def _slow(data: bytes) -> None:
    while len(data) < 5:
        pass


GOLDEN = [b"golden", b"golden 2"]
FAULTY = Fuzzed(_text, lambda: GOLDEN, (ValueError,))
HUNGRY = Fuzzed(_hungry, lambda: GOLDEN[:1], (ValueError,))
SLOW = Fuzzed(_slow, lambda: GOLDEN, (), cpu_seconds=0.2)
DEAF = Fuzzed(lambda data: None, lambda: GOLDEN, (ValueError,))


@pytest.mark.parametrize(
    ("name", "fault"),
    [("FAULTY", "KeyError"), ("HUNGRY", "MiB; .*: ValueError"), ("SLOW", "_Hang"), ("DEAF", "no input was refused")],
)
def test_a_fault_is_found(name: str, fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        fuzzing.survive(f"tests.test_fuzzing:{name}")


def test_an_input_is_a_function_of_its_number_by_which_a_failure_is_repeated() -> None:
    fuzzed = find("tests.test_fuzzing:FAULTY")
    first, again = ([mutant(fuzzed, GOLDEN, number) for number in range(300)] for _ in range(2))
    assert first == again and len(set(first)) > 200
    number = next(each for each in range(100_000) if mutant(fuzzed, GOLDEN, each)[:1] == b"\x80")
    code, said = fuzzing.command("tests.test_fuzzing:FAULTY", number, 1)
    assert code == 1 and f"input {number} (" in said and "KeyError: 'undocumented'" in said
