"""Lines of samples and commits: written when they are certain, read with checks."""

import json

import numpy as np
import pytest

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


def test_what_was_written_is_read(tmp_path, writer):
    writer.began(5, 1, 3, np.array([7, 2]))
    commit(writer, 5)
    writer.settled(5)
    [begun] = lines.samples(tmp_path, 2, 8)
    assert (begun.op, begun.view, begun.epoch, begun.positions.tolist()) == (5, 1, 3, [7, 2])
    expected = Committed(5, 1, (0, 2), 4, 2, receipt.summed(receipt.of(np.array([5, 6]))))
    assert list(lines.commits(tmp_path, 2)) == [expected]


def test_samples_are_in_the_file_before_the_call_returns(tmp_path, writer):
    writer.began(1, 1, 0, np.array([2, 6]))
    assert json.loads((tmp_path / "samples-2.jsonl").read_bytes())["positions"] == [2, 6]


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


def test_a_replacement_continues_after_the_last_whole_line(tmp_path, writer):
    writer.began(1, 1, 0, np.array([2]))
    commit(writer, 1)
    writer.settled(1)
    writer.close()
    with (tmp_path / "samples-2.jsonl").open("ab") as file:
        file.write(b'{"op": 2, "view": 1, "ep')  # it was killed
    second = Writer(tmp_path, 2, continues=True)
    second.began(5, 3, 0, np.array([4]))
    commit(second, 5)
    second.settled(5)
    second.close()
    assert [line.op for line in lines.samples(tmp_path, 2, 8)] == [1, 5]
    assert committed_ops(tmp_path) == [1, 5]


def test_another_job_begins_anew(tmp_path, writer):
    writer.began(1, 1, 0, np.array([2]))
    Writer(tmp_path, 2).close()
    assert list(lines.samples(tmp_path, 2, 8)) == []


def test_a_round_that_this_member_alone_may_hold_has_no_line(tmp_path):
    """It was removed after it had completed the round, and the others aborted it."""
    writer = Writer(tmp_path, 2)
    commit(writer, 1)
    commit(writer, 2)
    writer.began(3, 1, 0, np.array([4]))
    writer.close()
    assert committed_ops(tmp_path) == [1] and [each.op for each in lines.samples(tmp_path, 2, 8)] == [3]


def test_a_line_that_a_killed_process_did_not_finish_does_not_count(tmp_path, writer):
    writer.began(1, 1, 0, np.array([2, 6]))
    writer.began(2, 1, 0, np.array([3]))
    file = tmp_path / "samples-2.jsonl"
    file.write_bytes(file.read_bytes()[:-3])
    assert [each.op for each in lines.samples(tmp_path, 2, 8)] == [1]


def test_lines_of_an_earlier_job_go(tmp_path):
    for op in (8, 1):
        writer = Writer(tmp_path / "new" / "audit", 0)
        writer.began(op, 1, 0, np.array([2]))
        writer.close()
    assert [each.op for each in lines.samples(tmp_path / "new" / "audit", 0, 8)] == [1]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"--audit {tmp_path}/file: .*give a folder"):
        Writer(tmp_path / "file", 0)


def test_a_full_disk_is_named(tmp_path):
    (tmp_path / "samples-0.jsonl").symlink_to("/dev/full")
    writer = Writer(tmp_path, 0)
    with pytest.raises(UserError, match="--audit: .*samples-0.jsonl: No space left on device; make room"):
        writer.began(1, 1, 0, np.array([2]))
    writer.close()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "it is not JSON"),
        (b"7", "it is 7, expected an object"),
        (b'{"op": 1}', "it has the fields 'op', expected op, view, epoch, positions"),
        (b'{"op": 0, "view": 1, "epoch": 0, "positions": []}', "op is 0, expected a whole number from 1"),
        (b'{"op": true, "view": 1, "epoch": 0, "positions": []}', "op is True, expected a whole number"),
        (b'{"op": 1, "view": "1", "epoch": 0, "positions": []}', "view is '1', expected a whole number from 1"),
        (b'{"op": 1, "view": 1, "epoch": -1, "positions": []}', "epoch is -1, expected a whole number from 0"),
        (b'{"op": 1, "view": 1, "epoch": 0, "positions": 3}', "positions is 3, expected a list"),
        (
            b'{"op": 1, "view": 1, "epoch": 0, "positions": [8]}',
            "positions[0] is 8, expected a whole number from 0 to 7",
        ),
        (b'{"op": 1, "view": 1, "epoch": 0, "positions": [1.5]}', "positions[0] is 1.5, expected a whole number"),
    ],
)
def test_damaged_samples_are_named(tmp_path, line, said):
    good = b'{"op": 1, "view": 1, "epoch": 0, "positions": [7]}\n'
    (tmp_path / "samples-0.jsonl").write_bytes(good + line + b"\n")
    with pytest.raises(UserError) as error:
        list(lines.samples(tmp_path, 0, 8))
    assert str(error.value).startswith(f"{tmp_path}/samples-0.jsonl, line 2: {said}")
    assert str(error.value).endswith(": the file is damaged")


GOOD = {"op": 1, "view": 1, "members": [0], "dealt": 1, "committed": 1, "receipt": [1, 2, 3]}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"more": 1}, "expected op, view, members, dealt, committed, receipt"),
        ({"members": [-1]}, "members[0] is -1, expected"),
        ({"dealt": 1.0}, "dealt is 1.0, expected"),
        ({"committed": None}, "committed is None, expected"),
        ({"receipt": [1, 2]}, "receipt is [1, 2], expected a list of 3 values"),
        ({"receipt": [1, 2, 1 << 53]}, "receipt[2] is 9007199254740992, expected"),
    ],
)
def test_damaged_commits_are_named(tmp_path, changed, said):
    (tmp_path / "commits-0.jsonl").write_text(json.dumps(GOOD | changed) + "\n")
    with pytest.raises(UserError) as error:
        list(lines.commits(tmp_path, 0))
    assert f"{tmp_path}/commits-0.jsonl, line 1: " in str(error.value) and said in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"commits-1.jsonl: No such file or directory; a folder .* with --audit was"):
        list(lines.commits(tmp_path, 1))
