"""views.json: written whole, read with full checks; a replay refuses the file of another job."""

import dataclasses
import json
import logging

import numpy as np
import pytest

from dmltrain.audit import views_file
from dmltrain.audit.journal import Journal
from dmltrain.audit.views_file import Entered, Job, Recorded
from dmltrain.data.ranges import numbers, ranges
from dmltrain.errors import UserError
from dmltrain.kvstore.view import Lost, View

JOB = Job(4, 3, 60000, 256, 2, "mlp", "9c1f" * 16)
FIRST = View(1, 0, ((2, 0), (3, 1)), (0, 1))
SECOND = dataclasses.replace(FIRST.without([0], 7, (Lost(0, "end of stream"),)), shares=(96, 64, 96))
THIRD = SECOND.without([3], 9, left=(Lost(3, "SIGTERM"),))
RECORDED = Recorded(JOB, (Entered(FIRST), Entered(SECOND, 0, ((7, 7), (11, 14))), Entered(THIRD, 1)))


def test_what_was_written_is_read_and_replaced_whole(tmp_path):
    views_file.write(tmp_path, dataclasses.replace(RECORDED, entered=RECORDED.entered[:1]))
    views_file.write(tmp_path, RECORDED)
    assert [each.name for each in tmp_path.iterdir()] == ["views.json"]
    assert views_file.read(tmp_path / "views.json") == RECORDED
    assert RECORDED.views == (FIRST, SECOND, THIRD)


def test_older_views_that_a_stopped_leader_has_put_there_do_not_stay(tmp_path):
    stopped, goes_on = (Journal(logging.getLogger("test"), member, JOB, tmp_path) for member in (0, 1))
    for journal in (stopped, goes_on):
        journal.entered(FIRST)
    goes_on.entered(FIRST.without([0], 7))
    stopped.close(0)  # it knows of the first view only, and writes it
    assert len(views_file.read(tmp_path / "views.json").views) == 1
    goes_on.close(9)
    assert [each.members for each in views_file.read(tmp_path / "views.json").views] == [FIRST.members, (1, 2, 3)]


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


@pytest.mark.parametrize("share", [0, 0.3, 0.99])
def test_a_cut_file_is_refused(tmp_path, share):
    content = views_file.encode(RECORDED)
    assert "it is not JSON" in refusal(content[: int(share * len(content))], tmp_path)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("format",), 2, "its format is 2"),
        (("views",), [], "it has no views"),
        (("views",), 5, "views is 5"),
        (("job", "workers"), 0, "workers is 0"),
        (("job", "seed"), 1.5, "seed is 1.5"),
        (("job", "network"), 7, "network is 7"),
        (("job", "more"), 7, "job has the fields 'workers, seed, samples"),
        (("job", "workers"), 5, "its first view is not one of 5 workers"),
        (("job", "workers"), 2**40, "its first view is not one of 1099511627776 workers"),
        (("views", 0, "base"), 1, "its first view is not one of 4 workers"),
        (("views", 0, "number"), 2, "its first view is not one of 4 workers"),
        (("views", 2, "base"), 5, "view 3 has base 5 after base 7"),
        (("views", 2, "number"), 4, "view 4 follows view 2"),
        (("views", 2, "number"), True, "views[2]: number is True, expected"),
        (("views", 2, "hosts"), [[2], [1, 0]], "view 3 is not view 2 without"),
        (("views", 1, "hosts"), [[2], [1, 3]], "view 2 is not view 1 without"),
        (("views", 1, "hosts"), [[2], [3, 3]], "view 2 with hosts"),
        (("views", 1, "hosts"), [[2], [4, 3]], "view 2 is not view 1 without"),
        (("views", 1, "hosts"), [[2], [1 << 16]], "view 2: hosts[1][0] is 65536"),
        (("views", 1, "servers"), [], "view 2 with servers ()"),
        (("views", 1, "lost_servers"), [{"number": 0, "reason": ""}], "view 2 has lost server 0, and still has it"),
        (("views", 1, "joined_servers"), [7], "view 2 with joined servers (7,)"),
        (("views", 1, "behind"), [3, 3], "view 2 with workers (3, 3) behind"),
        (("views", 1, "hands_over"), [7], "view 2 with workers (7,) that hand over"),
        (("views", 2, "joined"), [1], "view 3: worker 1 joins, who was a member before"),
        (("views", 2, "joined"), [0], "view 3 with joined workers (0,)"),
        (("views", 2, "joined"), [9], "view 3 with joined workers (9,)"),
        (("views", 2, "left"), [{"member": 2, "reason": "SIGTERM"}], "view 3 has lost members who still belong to it"),
        (("views", 1, "left"), [{"member": 2}], "view 2: left[0] has the fields 'member'"),
        (("views", 2, "joined"), [-1], "view 3: joined[0] is -1"),
        (("views", 1, "lost", 0, "member"), 1, "view 2 has lost members who still belong to it"),
        (("views", 1, "lost", 0), [], "view 2: lost[0] is []"),
        (("views", 1, "lost", 0, "reason"), None, "view 2: lost[0]: reason is None"),
        (("views", 1, "returned", 0), [7], "view 2: returned[0] is [7]"),
        (("views", 1, "returned", 0), [7, 60000], "view 2: returned[0][1] is 60000, expected"),
        (("views", 1, "returned", 0), [7, 6], "view 2: returned[0] is from 7 to 6"),
        (("views", 1, "epoch"), -1, "view 2: epoch is -1"),
        (("views", 1, "shares"), [96, 64, 95], "view 2: shares are 255 samples together"),
        (("views", 1, "shares"), [128, 128], "view 2 with shares (128, 128)"),
        (("views", 1, "shares", 1), 1e9, "view 2: shares[1] is 1000000000.0"),
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
    return dataclasses.replace(RECORDED, entered=(*RECORDED.entered, *(Entered(each, 1) for each in more)))


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
        ({"network": "lenet"}, "network mlp", "network lenet", "--network mlp"),
        ({"data": "ab" * 32}, "data 9c1f9c1f9c1f", "data abababababab", "the same data"),
    ],
)
def test_each_fact_of_another_job_has_its_fix(changed, theirs, ours, fix):
    views_file.check_same(RECORDED, dataclasses.replace(JOB), "--replay F")
    with pytest.raises(UserError) as error:
        views_file.check_same(RECORDED, dataclasses.replace(JOB, **changed), "--replay F")
    said = f"--replay F: it is of a job with {theirs}, this one has {ours}: start this job with {fix}"
    assert str(error.value) == said
