"""Mutated audit files: each is read or refused, in limited memory and time (tests/fuzzing.py)."""

from dataclasses import replace

import pytest

from dmltrain.audit import lines, views_file
from dmltrain.audit.views_file import Entered, Job, Recorded
from dmltrain.kvstore.view import Lost, View
from tests.fuzzing import Fuzzed, parts, survive

FIRST = View(1, 0, ((2, 0), (3, 1)), (0, 1))
SECOND = replace(FIRST.without([0], 7, (Lost(0, "end of stream"),)), shares=(96, 64, 96))
RECORDED = Recorded(Job(4, 3, 600, 256, 2, "mlp", "9c1f"), (Entered(FIRST), Entered(SECOND, 0, ((7, 7), (11, 14)))))
WORDS = (b'"number": 2', b'"members": [', b"[[", b"]]", b"true", b"null", b"1e400", b"[" * 20000)

VIEWS = Fuzzed(views_file.parse, lambda: [views_file.encode(RECORDED)], (ValueError,), WORDS)
SAMPLES = Fuzzed(
    lambda data: lines.parse_samples(data, 8),
    lambda: [b'{"op": 7, "view": 1, "epoch": 0, "positions": [2, 6, 7]}\n'],
    (ValueError,),
    WORDS,
)
COMMITS = Fuzzed(
    lines.parse_commits,
    lambda: [b'{"op": 5, "view": 2, "members": [0, 2], "dealt": 12, "committed": 6, "receipt": [6, 36, 3573911269]}\n'],
    (ValueError,),
    WORDS,
)


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("name", ["VIEWS", "SAMPLES", "COMMITS"])
def test_no_audit_file_can_break_a_program(name: str, part: int) -> None:
    survive(f"tests.audit.test_fuzz:{name}", part)
