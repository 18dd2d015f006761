"""Lines of samples and commits: written when they are certain, read with checks. Their receipts add up exactly, and
tell different sets of positions from each other."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.audit import lines, receipt
from dmltrain.audit.lines import Committed, Writer
from dmltrain.errors import UserError


def commit(writer, op, members=(0, 2)):
    writer.committed(op, 1, members, 4, 2, receipt.of(np.array([op, op + 1])))


def committed_ops(folder, member=2):
    return [line.op for line in lines.commits(folder, member)]


@pytest.fixture
def writer(tmp_path):
    writer = Writer(tmp_path, 2)
    yield writer
    writer.close()


def test_what_was_written_is_read_and_samples_before_the_call_returns(tmp_path, writer):
    writer.began(5, 1, 3, np.array([7, 2]))
    assert json.loads((tmp_path / "samples-2.jsonl").read_bytes())["positions"] == [7, 2]
    commit(writer, 5)
    writer.settled(5)
    [begun] = lines.samples(tmp_path, 2, 8)
    assert (begun.op, begun.view, begun.epoch, begun.positions.tolist()) == (5, 1, 3, [7, 2])
    expected = Committed(5, 1, (0, 2), 4, 2, receipt.summed(receipt.of(np.array([5, 6]))))
    assert list(lines.commits(tmp_path, 2)) == [expected]


def test_a_commit_is_written_when_the_next_op_is_complete(tmp_path, writer):
    commit(writer, 1)
    assert committed_ops(tmp_path) == []
    commit(writer, 2)
    assert committed_ops(tmp_path) == [1]
    writer.settled(1)
    assert committed_ops(tmp_path) == [1]
    writer.settled(2)  # by an op that is no round, or by a view
    writer.settled(3)
    assert committed_ops(tmp_path) == [1, 2]


def test_files_of_an_earlier_job_are_emptied_for_workers_that_may_come_later(tmp_path, writer):
    """One may be there already, and writes when it has joined."""
    early = Writer(tmp_path, 4, continues=True)
    for file in ("samples-4.jsonl", "commits-4.jsonl", "commits-11.jsonl", "commits-x.jsonl"):
        (tmp_path / file).write_text("earlier\n")
    writer.began(1, 1, 0, np.array([2]))
    lines.clear(tmp_path, 3)
    early.began(7, 1, 0, np.array([2]))
    early.close()
    assert len(list(lines.samples(tmp_path, 2, 8))) == 1
    assert [line.op for line in lines.samples(tmp_path, 4, 8)] == [7] and committed_ops(tmp_path, 4) == []
    assert committed_ops(tmp_path, 11) == [] and (tmp_path / "commits-x.jsonl").read_text() == "earlier\n"


def test_a_line_that_a_killed_process_did_not_finish_does_not_count_and_a_replacement_continues_before_it(
    tmp_path, writer
):
    writer.began(1, 1, 0, np.array([2]))
    commit(writer, 1)
    writer.settled(1)
    writer.close()
    with (tmp_path / "samples-2.jsonl").open("ab") as file:
        file.write(b'{"op": 2, "view": 1, "epoch": 0, "positions": [3')  # it was killed
    assert [each.op for each in lines.samples(tmp_path, 2, 8)] == [1]
    second = Writer(tmp_path, 2, continues=True)
    second.began(5, 3, 0, np.array([4]))
    commit(second, 5)
    second.settled(5)
    second.close()
    assert [line.op for line in lines.samples(tmp_path, 2, 8)] == [1, 5]
    assert committed_ops(tmp_path) == [1, 5]


def test_lines_of_an_earlier_job_go(tmp_path):
    for op in (8, 1):
        writer = Writer(tmp_path / "new" / "audit", 0)
        writer.began(op, 1, 0, np.array([2]))
        writer.close()
    assert [each.op for each in lines.samples(tmp_path / "new" / "audit", 0, 8)] == [1]


def test_what_cannot_be_written_or_read_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"--audit {tmp_path}/file: .*give a folder"):
        Writer(tmp_path / "file", 0)
    with pytest.raises(UserError, match="commits-1.jsonl: No such file or directory; .*--audit"):
        list(lines.commits(tmp_path, 1))
    (tmp_path / "samples-0.jsonl").symlink_to("/dev/full")
    writer = Writer(tmp_path, 0)
    with pytest.raises(UserError, match="--audit: .*samples-0.jsonl: No space left on device; make room"):
        writer.began(1, 1, 0, np.array([2]))
    writer.close()


SAMPLES = {"op": 1, "view": 1, "epoch": 0, "positions": [7]}
COMMITS = {"op": 1, "view": 1, "members": [0], "dealt": 1, "committed": 1, "receipt": [1, 2, 3]}


@pytest.mark.parametrize(
    ("good", "damage", "said"),
    [
        (SAMPLES, "", "it is not JSON"),
        (SAMPLES, "7", "it is 7"),
        (SAMPLES, '{"op": 1}', "it has the fields 'op', expected op, view, epoch, positions"),
        (SAMPLES, {"op": 0}, "op is 0"),
        (SAMPLES, {"op": True}, "op is True"),
        (SAMPLES, {"view": "1"}, "view is '1'"),
        (SAMPLES, {"epoch": -1}, "epoch is -1"),
        (SAMPLES, {"positions": 3}, "positions is 3"),
        (SAMPLES, {"positions": [8]}, "positions[0] is 8, expected a whole number from 0 to 7"),
        (SAMPLES, {"positions": [1.5]}, "positions[0] is 1.5"),
        (COMMITS, {"more": 1}, "expected op, view, members, dealt, committed, receipt"),
        (COMMITS, {"members": [-1]}, "members[0] is -1"),
        (COMMITS, {"dealt": 1.0}, "dealt is 1.0"),
        (COMMITS, {"committed": None}, "committed is None"),
        (COMMITS, {"receipt": [1, 2]}, "receipt is [1, 2], expected a list of 3 values"),
        (COMMITS, {"receipt": [1, 2, 1 << 53]}, "receipt[2] is 9007199254740992"),
    ],
)
def test_damaged_lines_are_named(tmp_path, good, damage, said):
    name = "samples-0.jsonl" if good is SAMPLES else "commits-0.jsonl"
    line = damage if isinstance(damage, str) else json.dumps(good | damage)
    (tmp_path / name).write_text(f"{json.dumps(good)}\n{line}\n")
    with pytest.raises(UserError) as error:
        list(lines.samples(tmp_path, 0, 8) if good is SAMPLES else lines.commits(tmp_path, 0))
    assert str(error.value).startswith(f"{tmp_path}/{name}, line 2: ") and said in str(error.value)
    assert str(error.value).endswith(": the file is damaged")


# -- receipts ---------------------------------------------------------------------------------------------------------


positions = st.lists(st.integers(0, 1 << 40), max_size=50).map(lambda found: np.array(found, np.int64))


@given(st.lists(positions, min_size=1, max_size=6), st.randoms())
def test_the_sum_of_receipts_is_the_receipt_of_all_in_any_order(parts, random):
    whole = receipt.summed(receipt.of(np.concatenate(parts)))
    random.shuffle(parts)
    total = np.zeros(receipt.SIZE)
    for part in parts:
        total += receipt.of(part)
    assert receipt.summed(total) == whole
    assert whole[:2] == (sum(map(len, parts)), sum(int(each) + 1 for part in parts for each in part))


def test_nothing_has_an_empty_receipt():
    assert receipt.of(np.empty(0, np.int64)).tolist() == [0, 0, 0]
    assert receipt.of(np.empty(0, np.int64)).dtype == np.float64


def test_sums_are_exact_as_far_as_is_said():
    """Rounds of 2^20 samples of an epoch of 2^33, and the largest hashes of 2^21 members."""
    assert (1 << 20) * (1 << 33) <= 1 << 53 and (1 << 21) * (receipt.MODULUS - 1) < 1 << 53
    assert receipt.of(np.arange(10000))[2] < receipt.MODULUS, "a member's hashes are one number of 32 bits"
    parts = [receipt.of(np.arange((1 << 33) - (1 << 20) + place, 1 << 33, 4)) for place in range(4)]
    assert receipt.summed(sum(parts))[1] == (1 << 20) * (1 << 33) - sum(range(1 << 20))


def test_sets_of_the_same_size_and_sum_have_different_hashes():
    found = {}
    for some in itertools.combinations(range(20), 4):
        found.setdefault(receipt.summed(receipt.of(np.array(some))), []).append(some)
    assert all(len(each) == 1 for each in found.values())


def test_receipts_are_the_same_in_all_versions():
    """Files of one version are counted by another."""
    assert receipt.summed(receipt.of(np.array([0, 1, 5_000_000_000]))) == (3, 5_000_000_004, 2_878_377_669)
