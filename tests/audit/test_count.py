"""Counting an audit folder: jobs that lost members are exact, and every way to be wrong is a problem."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.audit import lines, receipt, views_file
from dmltrain.audit.count import count
from dmltrain.audit.lines import Writer
from dmltrain.audit.views_file import Entered, Job, Recorded
from dmltrain.data.deal import Dealing
from dmltrain.data.ranges import ranges
from dmltrain.errors import UserError
from dmltrain.kvstore.view import View


def write_job(folder, samples=22, batch=6, workers=3, epochs=2, losses=()):
    """What the members of a job write. `losses`: op -> the member that is lost after it has pushed this op."""
    losses, op, left, number = dict(losses), 0, list(range(workers)), 1
    writers = {member: Writer(folder, member) for member in left}
    first = View(1, 0, (tuple(left),), (0,))
    entered = [Entered(first)]
    for epoch in range(epochs):
        dealing = Dealing(samples, batch, left)
        while not dealing.finished:
            op += 1
            for member in left:
                writers[member].began(op, number, epoch, dealing.positions_of(member))
            if losses.get(op) in left and len(left) > 1:
                left.remove(losses[op])
                number += 1
                dealing.enter(left)
                view = entered[-1].view.without([losses[op]], op - 1)
                entered.append(Entered(view, epoch, ranges(dealing.returned)))
            total = sum(receipt.of(dealing.positions_of(member)) for member in left)
            for member in left:
                writers[member].committed(op, number, left, dealing.round.dealt, int(total[0]), total)
            dealing.committed(left)
        op += 1  # the barrier at the epoch's end
        for member in left:
            writers[member].settled(op - 1)
    for writer in writers.values():
        writer.close()
    views_file.write(folder, Recorded(Job(workers, 1, samples, batch, epochs, "mlp", ""), tuple(entered)))


@given(st.dictionaries(st.integers(1, 12), st.integers(0, 2)), st.integers(1, 30), st.integers(1, 8))
def test_a_job_that_loses_members_is_exact(tmp_path_factory, losses, samples, batch):
    folder = tmp_path_factory.mktemp("audit")
    write_job(folder, samples, batch, losses=losses)
    found = count(folder)
    assert found.problems == ()
    assert list(found.times) == [0, 1] and all(np.all(each == 1) for each in found.times.values())


def test_in_some_views_an_op_is_a_round_and_in_others_the_step_of_one_member(tmp_path):
    """The same numbers mean others there."""
    writers = [Writer(tmp_path, member) for member in range(2)]
    parts = [np.array([0, 2]), np.array([1, 3])]
    views = [View(1, 0, ((0, 1),), (0,), kvstore="dist_sync")]
    views += [replace(views[0], number=2, base=1, until=2, drains=True)]
    views += [View(3, 2, ((0, 1),), (0,), kvstore="dist_async"), View(4, 9, ((0, 1),), (0,), kvstore="dist_sync")]

    def together(op, view, first):
        total = sum(receipt.of(first + part) for part in parts)
        for writer, part in zip(writers, parts, strict=True):
            writer.began(op, view, 0, first + part)
            writer.committed(op, view, [0, 1], 4, 4, total)
            writer.settled(op)

    together(1, 1, 0)
    together(2, 2, 4)
    for member, part in enumerate(parts):
        writers[member].began(2, 3, 0, 8 + part)
        writers[member].committed_alone(2, 3, member, receipt.of(8 + part))
    together(10, 4, 12)
    for writer in writers:
        writer.close()
    job = Job(2, 1, 16, 4, 1, "mlp", "", kvstore="dist_sync")
    views_file.write(tmp_path, Recorded(job, tuple(map(Entered, views))))
    found = count(tmp_path)
    assert found.problems == () and (found.times[0] == 1).all()


@pytest.fixture
def folder(tmp_path):
    write_job(tmp_path, losses={2: 1})
    assert count(tmp_path).problems == ()
    return tmp_path


def edit(path, change):
    """Rewrite the file by change(list of its objects)."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    change(found)
    path.write_text("".join(json.dumps(each) + "\n" for each in found))


def drop(*places):
    return lambda found: [found.pop(place) for place in sorted(places, reverse=True)]


def put(place, name, value):
    return lambda found: found[place].__setitem__(name, value)


def test_what_a_lost_member_pushed_last_does_not_count(folder):
    """Its samples of the carried round were dealt again."""
    assert [each.op for each in lines.samples(folder, 1, 22)] == [1, 2]
    edit(folder / "samples-1.jsonl", put(1, "positions", [0]))
    assert count(folder).problems == ()


def pushed_again(found):
    found.insert(1, found[0] | {"view": 2})


@pytest.mark.parametrize(
    ("files", "changes", "facts"),  # what each of the problems has, with | between them
    [
        # no line of its samples
        ("samples-2", [drop(2)], "op 3: member 2 |its members' samples make (3, |never committed: 3 position(s): "),
        # one sample twice, another one not
        (
            "samples-0",
            [put(0, "positions", [1, 3])],
            "op 1: its|never committed: 1 position(s): 0|once: 1 position(s): 1",
        ),
        # as many others, with the same sum
        ("samples-0", [put(0, "positions", [1, 2])], "op 1: its receipt is (6, 21, |never|more than once"),
        ("commits-2", [put(3, "view", 9)], "op 4: the commit lines of members 0 and 2 differ"),
        ("commits-0 commits-2", [drop(2)], "epoch 0: never committed: 6 position(s): "),  # which nobody committed
        ("commits-0 commits-2", [put(2, "committed", 5)], "op 3: 5 samples of 6 are committed, its receipt has 6"),
        (
            "samples-2",
            [put(0, "epoch", 1)],
            "op 1: member 2 is in epoch 1, others in 0|epoch 0: never|epoch 1: committed",
        ),
        # pushed again: with the same samples it is fine; with others it was dealt twice
        ("samples-0", [pushed_again], ""),
        ("samples-0", [pushed_again, put(1, "positions", [4])], "op 1: member 0 pushed different samples"),
    ],
)
def test_what_is_wrong_is_named(folder, files, changes, facts):
    for file in files.split():
        for change in changes:
            edit(folder / f"{file}.jsonl", change)
    found, expected = count(folder).problems, facts.split("|") if facts else []
    assert len(found) == len(expected), found
    for problem, fact in zip(found, expected, strict=True):
        assert fact in problem


def test_samples_are_counted(folder):
    [first, *_] = lines.samples(folder, 0, 22)
    assert first.positions.tolist() == [0, 3]
    edit(folder / "samples-0.jsonl", put(0, "positions", [1, 3]))
    assert count(folder).times[0][:4].tolist() == [0, 2, 1, 1]


def test_a_missing_file_is_named(folder):
    (folder / "samples-1.jsonl").unlink()
    with pytest.raises(UserError, match="samples-1.jsonl: No such file or directory; .* from all hosts"):
        count(folder)
    (folder / "views.json").unlink()
    with pytest.raises(UserError, match="^/.*/views.json: No such file or directory; "):
        count(folder)
