"""Counting an audit folder: jobs that lost members are exact, and every way to be wrong is a problem.
Lines of samples and commits are written when they are certain, and their receipts tell sets of positions apart."""

import dataclasses
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.audit import lines, sample_checksum, views_file
from dmltrain.audit.cli import main
from dmltrain.audit.count import count
from dmltrain.audit.journal import Journal
from dmltrain.audit.lines import Committed, Writer
from dmltrain.audit.views_file import EnteredView, JobFacts, RecordedJob
from dmltrain.base.errors import UserError
from dmltrain.data.assignment.ranges import numbers, ranges
from dmltrain.data.assignment.sync_assignment import SyncAssignment
from dmltrain.kvstore.view import Lost, View


def write_job(folder, samples=22, batch=6, workers=3, epochs=2, losses=()):
    """What the members of a job write. `losses`: op -> the member that is lost after it has pushed this op."""
    losses, op, left, number = dict(losses), 0, list(range(workers)), 1
    writers = {member: Writer(folder, member) for member in left}
    first = View(1, 0, (tuple(left),), (0,))
    entered = [EnteredView(first)]
    for epoch in range(epochs):
        assignment = SyncAssignment(samples, batch, left)
        while not assignment.finished:
            op += 1
            for member in left:
                writers[member].began(op, number, epoch, assignment.positions_of(member))
            if losses.get(op) in left and len(left) > 1:
                left.remove(losses[op])
                number += 1
                assignment.enter(left)
                view = entered[-1].view.without([losses[op]], op - 1)
                entered.append(EnteredView(view, epoch, ranges(assignment.returned)))
            total = sum(sample_checksum.of(assignment.positions_of(member)) for member in left)
            for member in left:
                writers[member].committed(op, number, left, assignment.round.size, int(total[0]), total)
            assignment.committed(left)
        op += 1  # the barrier at the epoch's end
        for member in left:
            writers[member].settled(op - 1)
    for writer in writers.values():
        writer.close()
    views_file.write(folder, RecordedJob(JobFacts(workers, 1, samples, batch, epochs, "mlp", ""), tuple(entered)))


@given(st.dictionaries(st.integers(1, 12), st.integers(0, 2)), st.integers(1, 30), st.integers(1, 8))
def test_a_job_that_loses_members_is_exact(tmp_path_factory, losses, samples, batch):
    folder = tmp_path_factory.mktemp("audit")
    write_job(folder, samples, batch, losses=losses)
    found = count(folder)
    assert found.problems == ()
    assert list(found.times) == [0, 1] and all(np.all(time == 1) for time in found.times.values())


def test_in_some_views_an_op_is_a_round_and_in_others_the_step_of_one_member(tmp_path):
    """The same numbers mean others there."""
    writers = [Writer(tmp_path, member) for member in range(2)]
    parts = [np.array([0, 2]), np.array([1, 3])]
    views = [View(1, 0, ((0, 1),), (0,), kvstore="dist_sync")]
    views += [replace(views[0], number=2, base=1, until=2, drains=True)]
    views += [View(3, 2, ((0, 1),), (0,), kvstore="dist_async"), View(4, 9, ((0, 1),), (0,), kvstore="dist_sync")]

    def together(op, view, first):
        total = sum(sample_checksum.of(first + part) for part in parts)
        for writer, part in zip(writers, parts, strict=True):
            writer.began(op, view, 0, first + part)
            writer.committed(op, view, [0, 1], 4, 4, total)
            writer.settled(op)

    together(1, 1, 0)
    together(2, 2, 4)
    for member, part in enumerate(parts):
        writers[member].began(2, 3, 0, 8 + part)
        writers[member].committed_alone(2, 3, member, sample_checksum.of(8 + part))
    together(10, 4, 12)
    for writer in writers:
        writer.close()
    job = JobFacts(2, 1, 16, 4, 1, "mlp", "", kvstore="dist_sync")
    views_file.write(tmp_path, RecordedJob(job, tuple(map(EnteredView, views))))
    found = count(tmp_path)
    assert found.problems == () and (found.times[0] == 1).all()


def test_the_program_counts_the_audit_of_an_elastic_job(folder, capsys):
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == "epoch 0: 22 of 22 used\nepoch 1: 22 of 22 used\n"
    edit(folder / "samples-0.jsonl", drop(0))
    assert main([str(folder)]) == 1 and "problem: op 1: member 0 has no line" in capsys.readouterr().out


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
    assert [sample.op for sample in lines.samples(folder, 1, 22)] == [1, 2]
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
        ("samples-0", [put(0, "positions", [1, 3])], "op 1: |never committed: 1 position(s): 0|once: 1 position(s): 1"),
        # as many others, with the same sum
        ("samples-0", [put(0, "positions", [1, 2])], "op 1: its receipt is (6, 21, |never|more than once"),
        ("commits-2", [put(3, "view", 9)], "op 4: the commit lines of members 0 and 2 differ"),
        ("commits-0 commits-2", [drop(2)], "epoch 0: never committed: 6 position(s): "),  # which nobody committed
        ("commits-0 commits-2", [put(2, "committed", 5)], "op 3: 5 samples of 6 are committed, its receipt has 6"),
        ("samples-2", [put(0, "epoch", 1)], "op 1: member 2 is in epoch 1, others in 0|epoch 0: never|epoch 1: comm"),
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


def test_a_missing_file_is_named(folder):
    (folder / "samples-1.jsonl").unlink()
    with pytest.raises(UserError, match="samples-1.jsonl: No such file or directory; .* from all hosts"):
        count(folder)
    (folder / "views.json").unlink()
    with pytest.raises(UserError, match="^/.*/views.json: No such file or directory; "):
        count(folder)


def commit(writer, op, members=(0, 2)):
    writer.committed(op, 1, members, 4, 2, sample_checksum.of(np.array([op, op + 1])))


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
    expected = Committed(5, 1, (0, 2), 4, 2, sample_checksum.summed(sample_checksum.of(np.array([5, 6]))))
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
    assert [sample.op for sample in lines.samples(tmp_path, 2, 8)] == [1]
    second = Writer(tmp_path, 2, continues=True)
    second.began(5, 3, 0, np.array([4]))
    commit(second, 5)
    second.settled(5)
    second.close()
    assert [line.op for line in lines.samples(tmp_path, 2, 8)] == [1, 5]
    assert committed_ops(tmp_path) == [1, 5]


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
        (SAMPLES, '{"op": 1}', "it lacks the field 'view', expected op, view, epoch, positions"),
        (SAMPLES, {"op": 0}, "op is 0"),
        (SAMPLES, {"epoch": -1}, "epoch is -1"),
        (SAMPLES, {"positions": [8]}, "positions[0] is 8, expected a whole number from 0 to 7"),
        (COMMITS, {"members": [-1]}, "members[0] is -1"),
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
    whole = sample_checksum.summed(sample_checksum.of(np.concatenate(parts)))
    random.shuffle(parts)
    total = np.zeros(sample_checksum.SIZE)
    for part in parts:
        total += sample_checksum.of(part)
    assert sample_checksum.summed(total) == whole
    assert whole[:2] == (sum(map(len, parts)), sum(int(each) + 1 for part in parts for each in part))


def test_sums_are_exact_as_far_as_is_said():
    """Rounds of 2^20 samples of an epoch of 2^33, and the largest hashes of 2^21 members."""
    assert (1 << 20) * (1 << 33) <= 1 << 53 and (1 << 21) * (sample_checksum.MODULUS - 1) < 1 << 53
    assert sample_checksum.of(np.arange(10000))[2] < sample_checksum.MODULUS, (
        "a member's hashes are one number of 32 bits"
    )
    parts = [sample_checksum.of(np.arange((1 << 33) - (1 << 20) + place, 1 << 33, 4)) for place in range(4)]
    assert sample_checksum.summed(sum(parts))[1] == (1 << 20) * (1 << 33) - sum(range(1 << 20))


def test_receipts_are_the_same_in_all_versions_also_that_of_nothing():
    """Files of one version are counted by another."""
    nothing = sample_checksum.of(np.empty(0, np.int64))
    assert nothing.tolist() == [0, 0, 0] and nothing.dtype == np.float64
    assert sample_checksum.summed(sample_checksum.of(np.array([0, 1, 5_000_000_000]))) == (
        3,
        5_000_000_004,
        2_878_377_669,
    )


# views.json: written whole, read with full checks; a replay refuses the file of another job


JOB = JobFacts(4, 3, 60000, 256, 2, "mlp", "9c1f" * 16, options={"--wd": "0", "--mixup": "0.2"})
FIRST = View(1, 0, ((2, 0), (3, 1)), (0, 1))
SECOND = dataclasses.replace(FIRST.without([0], 7, (Lost(0, "end of stream"),)), shares=(96, 64, 96))
THIRD = SECOND.without([3], 9, left=(Lost(3, "SIGTERM"),))
RECORDED = RecordedJob(JOB, (EnteredView(FIRST), EnteredView(SECOND, 0, ((7, 7), (11, 14))), EnteredView(THIRD, 1)))


def test_older_views_that_a_stopped_leader_has_put_there_do_not_stay(tmp_path):
    stopped, goes_on = (Journal(logging.getLogger("test"), member, JOB, tmp_path) for member in (0, 1))
    for journal in (stopped, goes_on):
        journal.entered(FIRST)
    goes_on.entered(FIRST.without([0], 7))
    stopped.close(0)  # it knows of the first view only, and writes it
    assert len(views_file.read(tmp_path / "views.json").views) == 1
    goes_on.close(9)
    assert [view.members for view in views_file.read(tmp_path / "views.json").views] == [FIRST.members, (1, 2, 3)]


def test_ranges_are_runs_of_ascending_positions():
    assert ranges(np.array([3, 4, 5, 8, 10, 11])) == ((3, 5), (8, 8), (10, 11))
    assert ranges(np.empty(0, np.int64)) == () and not len(numbers(()))
    assert numbers([[3, 5], [8, 8], [10, 11]]).tolist() == [3, 4, 5, 8, 10, 11]


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=f"--audit {tmp_path}/none: views.json .*: No such file"):
        views_file.write(tmp_path / "none", RECORDED)
    with pytest.raises(UserError, match="^--replay .*none: No such file or directory; "):
        views_file.read(tmp_path / "none", "--replay")


def refusal(content, tmp_path):
    """What is said of a file of this content."""
    path = tmp_path / "views.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        views_file.read(path, "--replay")
    said = str(error.value)
    assert said.startswith(f"--replay {path}: ") and said.endswith(": the file is damaged")
    return said.removeprefix(f"--replay {path}: ").removesuffix(": the file is damaged")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("format",), 2, "format is 2"),
        (("views",), [], "it has no views"),
        (("job", "workers"), 0, "workers is 0"),
        (("job", "more"), 7, "job has the unknown field 'more', expected workers, seed, samples"),
        (("job", "workers"), 5, "its first view is not one of 5 workers"),
        (("job", "workers"), 2**40, "its first view is not one of 1099511627776 workers"),
        (("views", 0, "base"), 1, "its first view is not one of 4 workers"),
        (("views", 0, "number"), 2, "its first view is not one of 4 workers"),
        (("views", 2, "base"), 5, "view 3 has base 5 after base 7"),
        (("views", 2, "number"), 4, "view 4 follows view 2"),
        (("views", 2, "hosts"), [[2], [1, 0]], "view 3 is not view 2 without"),
        (("views", 1, "hosts"), [[2], [1, 3]], "view 2 is not view 1 without"),
        (("views", 1, "hosts"), [[2], [3, 3]], "view 2 with hosts"),
        (("views", 1, "hosts"), [[2], [4, 3]], "view 2 is not view 1 without"),
        (("views", 1, "hosts"), [[2], [1 << 16]], "views[1].hosts[1][0] is 65536"),
        (("views", 1, "servers"), [], "view 2 with servers ()"),
        (("views", 1, "lost_servers"), [{"number": 0, "reason": ""}], "view 2 has lost server 0, and still has it"),
        (("views", 1, "joined_servers"), [7], "view 2 with joined servers (7,)"),
        (("views", 1, "behind"), [3, 3], "view 2 with workers (3, 3) behind"),
        (("views", 1, "hands_over"), [7], "view 2 with workers (7,) that hand over"),
        (("views", 2, "joined"), [1], "view 3: worker 1 joins, who was a member before"),
        (("views", 2, "joined"), [0], "view 3 with joined workers (0,)"),
        (("views", 2, "joined"), [9], "view 3 with joined workers (9,)"),
        (("views", 2, "left"), [{"member": 2, "reason": "SIGTERM"}], "view 3 has lost members who still belong to it"),
        (("views", 1, "lost", 0, "member"), 1, "view 2 has lost members who still belong to it"),
        (("views", 1, "returned", 0), [7, 60000], "view 2: returned has 7 to 60000, expected"),
        (("views", 1, "returned", 0), [7, 6], "view 2: returned has 7 to 6, expected"),
        (("views", 1, "shares"), [96, 64, 95], "view 2: shares are 255 samples together"),
        (("views", 1, "shares"), [128, 128], "view 2 with shares (128, 128)"),
    ],
)
def test_a_damaged_file_is_refused_by_field(tmp_path, place, value, said):
    content = json.loads(views_file.encode(RECORDED))
    holder = content
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    assert said in refusal(json.dumps(content).encode(), tmp_path)


def recorded_with(*more):
    return dataclasses.replace(RECORDED, entered=(*RECORDED.entered, *(EnteredView(each, 1) for each in more)))


def test_members_that_return_stand_at_the_end_of_their_host_and_others_may_come():
    back = View(4, 9, ((2,), (1, 3), (0,)), (0, 1), joined=(3, 0))
    more = View(4, 9, ((2, 4), (1,), (9,)), (0, 1), joined=(4, 9))
    for view in (back, more):
        assert views_file.parse(views_file.encode(recorded_with(view))) == recorded_with(view)
    recorded = recorded_with(more)
    assert recorded.members == (0, 1, 2, 3, 4, 9)
    views_file.check_ranks(recorded, 10, "--replay F")
    with pytest.raises(UserError, match="^--replay F: worker 9 .* 9 worker.*DMLTRAIN_MAX_WORKERS=10 .*--elastic"):
        views_file.check_ranks(recorded, 9, "--replay F")


def test_no_replay_has_views_in_which_workers_made_steps_of_their_own():
    last = RECORDED.views[-1]
    more = View(last.number + 1, last.base + 1, last.hosts, last.servers, kvstore="dist_ssp", staleness=4.0)
    views_file.check_together(RECORDED, "--replay F")
    with pytest.raises(UserError, match=f"^--replay F: .*dist_ssp from view {more.number} on"):
        views_file.check_together(recorded_with(more), "--replay F")


@pytest.mark.parametrize(
    ("changed", "theirs", "ours", "fix"),
    [
        ({"workers": 2, "seed": 5}, "4 worker(s) and seed 3", "2 worker(s) and seed 5", "-n 4 and --seed 3"),
        ({"workers": 1}, "4 worker(s)", "1 worker(s)", "-n 4"),
        ({"seed": 1}, "seed 3", "seed 1", "--seed 3"),
        ({"samples": 9}, "60000 samples an epoch", "9 samples an epoch", "the same --num-examples"),
        ({"batch": 128}, "256 samples a step", "128 samples a step", "--batch-size 64"),
        ({"epochs": 5}, "2 epoch(s)", "5 epoch(s)", "--num-epochs 2"),
        ({"each": 64}, "--batch constant", "--batch per-worker", "--batch constant"),
        ({"network": "lenet"}, "network mlp", "network lenet", "--network mlp"),
        ({"data": "ab" * 32}, "data 9c1f9c1f9c1f", "data abababababab", "the same data"),
        ({"options": {"--wd": "0"}}, "--mixup 0.2", "no --mixup", "--mixup 0.2"),
        ({"options": {**JOB.options, "--sync-bn": "1"}}, "no --sync-bn", "--sync-bn 1", "no --sync-bn"),
    ],
)
def test_each_fact_of_another_job_has_its_fix(changed, theirs, ours, fix):
    for same in (JOB, dataclasses.replace(JOB, options=None)):  # a script's are not known
        views_file.check_same(RECORDED, same, "--replay F")
    with pytest.raises(UserError) as error:
        views_file.check_same(RECORDED, dataclasses.replace(JOB, **changed), "--replay F")
    said = f"--replay F: it is of a job with {theirs}, this one has {ours}: start this job with {fix}"
    assert str(error.value) == said
