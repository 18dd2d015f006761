"""`dmltrain job set` changes the kvstore of a running job: on the bare state machine, and with real processes."""

import math

import pytest

from dmltrain_launch.agent.commands import Tell
from dmltrain_launch.agent.events import Bound, Started
from dmltrain_launch.agent.reports import ASKED, MADE, REFUSED, Slowest, Told
from dmltrain_launch.cli import job
from dmltrain_launch.command_line.job_options import parse_job
from dmltrain_launch.commands.processes import lost
from dmltrain_launch.control.message import ADD, SET
from dmltrain_launch.job.rule import parse_rule
from dmltrain_launch.job.settings import STAYS, Settings, parse
from dmltrain_launch.run.planned.changes import NOT_ELASTIC
from dmltrain_launch.run.planned.settings import LOST, NONE, READ_SECONDS, SILENT, request
from dmltrain_launch.run.supervisor.action import Reply, Send
from dmltrain_launch.run.supervisor.event import Asked, Tick
from tests.forked_job import forked
from tests.launch.conftest import ROOT
from tests.launch.refusal import refusal
from tests.launch.test_changes import Changing
from tests.launch.test_losses import SCHEDULER, WORKER_1, Job3
from tests.waiting import wait_for


class Setting(Job3):
    """A plain job of three hosts in which everything runs; the scheduler is on a."""

    def __init__(self, **most):
        super().__init__(elastic=0, **most)

    def ask(self, what, number=0, do=SET):
        return self.say(Asked(number, do, what))


def sent(number, kv_store, staleness=STAYS, task=SCHEDULER):
    return Send("a", Tell(task, request(number, Settings(kv_store, staleness), "dmltrain job set")))


def replied(number, code, text):
    return Reply(number, code, ((text, None),))


def next_scheduler(job: Changing) -> None:
    job.say(Bound("a", {"scheduler": 9100}), Started("a", len(job.supervisor.processes) - 1, 4712))


def test_the_change_goes_to_the_scheduler_and_its_words_are_the_answer():
    job = Setting()
    assert job.ask("kv_store=dist_ssp staleness=4") == [sent(1, "dist_ssp", 4.0)]
    assert job.say(Told(1, ASKED)) == []
    job.now += 5
    text = "kv_store=dist_ssp staleness=4 on all workers after step 147"
    assert job.say(Told(1, MADE, "kv_store=dist_ssp staleness=4", "after step 147")) == [replied(0, 0, text)]
    assert job.notices == [f"{text}; asked for by dmltrain job set"]
    change = {"after": 5.0, "now": "kv_store=dist_ssp staleness=4", "by": "dmltrain job set", "where": "after step 147"}
    assert job.record["kvstore_changes"] == [change]
    line = "changed: kv_store=dist_ssp staleness=4 after step 147, 5 s after the start; asked for by dmltrain job set"
    assert lost(job.record) == [line]
    job.finish(2, 3, 4)
    assert job.last_line.endswith("; changed: kv_store=dist_ssp staleness=4 after step 147")


def test_a_refusal_is_the_answer_and_the_next_change_can_come():
    job = Setting()
    job.ask("staleness=2")
    assert job.say(Told(1, ASKED), Told(1, REFUSED, "why not")) == [replied(0, 2, "why not")]
    assert job.notices == [] and job.record["kvstore_changes"] == []
    assert job.ask("kv_store=dist_async", 1) == [sent(2, "dist_async")]


def test_one_change_at_a_time():
    job = Setting()
    assert job.ask("staleness=2") == [sent(1, "", 2.0)]
    assert job.ask("staleness=3", 1) == []
    assert job.say(Told(2, ASKED)) == []
    actions = job.say(Told(1, ASKED), Told(1, MADE, "a", "after step 7"))
    assert actions == [sent(2, "", 3.0), replied(0, 0, "a on all workers after step 7")]
    assert job.say(Told(2, MADE, "b", "after step 9")) == [replied(1, 0, "b on all workers after step 9")]
    assert job.say(Told(2, MADE, "b", "after step 9"), Told(3, MADE, "c", "after step 9")) == []


def test_a_scheduler_that_does_not_read_is_no_reason_to_wait():
    job = Setting()
    job.ask("staleness=2")
    before = job.now
    assert job.tick() == [replied(0, 125, SILENT)] and job.now == before + 10
    job.ask("staleness=3", 1)
    job.say(Told(2, ASKED))
    assert job.supervisor.deadline == math.inf


def test_the_end_of_the_job_answers():
    job = Setting()
    job.ask("staleness=2")
    job.say(Told(1, ASKED))
    assert job.exit(WORKER_1, 1)[-1] == replied(0, 125, "the job has ended: worker 1 (pid 103 on b) exited with code 1")


def test_what_is_asked_while_nothing_can_change():
    job = Setting(started=4)
    starting = "the job is still starting: try again when all its processes run"
    assert job.ask("staleness=2") == [replied(0, 125, starting)]
    job = Setting()
    assert job.ask("h6", do=ADD) == [replied(0, 2, NOT_ELASTIC)]
    [reply] = job.ask("stale=2")
    assert reply.code == 2 and reply.notes[0][0].startswith("'stale=2': expected kv_store=VALUE or staleness=VALUE")
    job.exit(WORKER_1, 0)
    assert job.ask("staleness=2") == [replied(0, 125, "the job is ending")]


def test_an_elastic_job_changes_with_a_view():
    job = Changing()
    assert job.ask(0, SET, "staleness=2") == [sent(1, "", 2.0)]
    job.say(Told(1, ASKED), Told(1, MADE, "kv_store=dist_ssp staleness=2", "from view 3 on"))
    assert job.replies[0] == replied(0, 0, "kv_store=dist_ssp staleness=2 on all workers from view 3 on")
    assert job.ask(1, SET, "staleness=3") == [sent(2, "", 3.0)]
    job.now += READ_SECONDS
    assert job.say(Tick()) == []
    assert job.replies[1] == replied(1, 125, SILENT)


def test_a_change_is_not_lost_with_the_scheduler():
    """The next one, on another host, does not know what was asked for."""
    job = Changing(more={"restart_scheduler": 1})
    job.ask(0, SET, "staleness=2")
    job.ask(1, SET, "staleness=3")
    job.exit(SCHEDULER, -9)
    assert [job.replies[number] for number in (0, 1)] == [replied(0, 125, LOST), replied(1, 125, NONE)]
    assert job.ask(2, SET, "staleness=4") == [] and job.replies[2] == replied(2, 125, NONE)
    next_scheduler(job)
    assert job.ask(3, SET, "staleness=4") == [sent(4, "", 4.0, len(job.supervisor.processes) - 1)]


STRAGGLER = "when straggler > 30 % set kv_store=dist_ssp staleness=4"
RULES = (parse_rule(STRAGGLER), parse_rule("when straggler < 10 % set kv_store=dist_async"))


@pytest.mark.parametrize("make", [Setting, Changing])
def test_the_first_rule_that_holds_is_applied_once(make):
    job = make(more={"rules": RULES})
    assert job.say(Slowest(2, 30.0)) == [], "neither holds"
    (first,) = job.say(Slowest(2, 55.0))
    by = f"the rule '{STRAGGLER}': worker 2 computes 55 % longer than the median"
    assert first == Send("a", Tell(SCHEDULER, request(1, Settings("dist_ssp", 4.0), by)))
    assert job.say(Slowest(2, 60.0)) == [], "it was the last one"
    job.say(Told(1, ASKED), Told(1, REFUSED, "why not"))
    assert job.notices == [f"kvstore not changed: why not; asked for by {by}"]
    (second,) = job.say(Slowest(1, 5.0))
    assert '"dist_async"' in second.command.message
    job.say(Told(2, ASKED))
    job.exit(WORKER_1, 0)
    assert job.say(Slowest(2, 55.0)) == [], "the job is ending"


def test_a_rule_is_tried_again_after_a_scheduler_that_was_lost():
    job = Changing(more={"restart_scheduler": 1, "rules": RULES})
    assert len(job.say(Slowest(2, 55.0))) == 1
    job.exit(SCHEDULER, -9)
    assert any(LOST in notice for notice in job.notices)
    next_scheduler(job)
    (again,) = job.say(Slowest(2, 55.0))
    assert '"dist_ssp"' in again.command.message


def test_settings_are_parsed():
    assert parse("kv_store=dist_ssp staleness=4") == Settings("dist_ssp", 4.0)
    assert parse("--kv-store=dist_async".strip("-")) == Settings("dist_async")
    assert parse("staleness=0") == Settings("", 0.0)
    request = parse_job(["set", "train", "kv_store=dist_ssp", "staleness=4"])
    assert (request.verb, request.target, request.change) == ("set", "train", "kv_store=dist_ssp staleness=4")


@pytest.mark.parametrize(
    "words, message",
    [
        ("set", "dmltrain-job set takes a JOB and settings"),
        ("set fit", "dmltrain-job set takes a JOB and settings"),
        ("set fit dist_ssp", "'dist_ssp': expected kv_store=VALUE or staleness=VALUE"),
        ("set fit lr=3", "'lr=3': expected kv_store=VALUE"),
        *((f"set fit staleness={x}", f"staleness={x}: expected 0 or more steps") for x in ("-1", "x", "nan", "inf")),
        ("set fit kv_store=", "kv_store=: expected a kvstore such as dist_ssp"),
        ("set fit staleness=1 staleness=2", "'staleness=2': staleness is there twice"),
        ("set --grace 2 fit staleness=1", "--grace is not an option of dmltrain-job set"),
    ],
)
def test_wrong_settings_are_refused(words, message):
    assert refusal(parse_job, words.split()).startswith(message)


@pytest.mark.thorough
def test_a_training_job_changes_and_goes_on(launcher, capsys):
    """An elastic one: tests/test_elastic_async.py."""
    words = "--kv-store dist_sync --update-on-kvstore 1 --network mlp --batch-size 16 --num-epochs 4 --emulate-step 0.1"
    program = forked(ROOT / "examples/train_digits.py", *words.split())
    launched = launcher.start("-n", 2, "-s", 2, *program)
    wait_for(lambda: b"Epoch[0] Train-accuracy" in launched.log("worker-1"), "the first epoch")
    for settings in ("kv_store=dist_ssp staleness=4", "staleness=1", "kv_store=dist_sync"):
        assert job(["set", str(launched.logs), *settings.split()]) == 0
    assert job(["set", str(launched.logs), "kv_store=dist_local"]) == 2
    *said, no = capsys.readouterr().out.splitlines()
    now = ["kv_store=dist_ssp staleness=4", "kv_store=dist_ssp staleness=1", "kv_store=dist_sync"]
    assert "asked for by dmltrain job set\n" in launched.err.read_text()
    for line, each in zip(said, now, strict=True):
        assert line.startswith(f"{each} on all workers after ")
    assert no.startswith("kv_store=dist_local does not run the optimizer on the servers: expected dist_sync or")
    assert "; changed: kv_store=dist_ssp staleness=4 after " in launched.ends().err.splitlines()[-1]
    assert job(["ps", str(launched.logs)]) == 0
    assert "\nchanged: kv_store=dist_ssp staleness=4 after " in capsys.readouterr().out
    for change in launched.record["kvstore_changes"]:
        line = f"{change['where']} of this job: {change['now']} (before: ".encode()
        assert all(line in launched.log(f"worker-{rank}") for rank in range(2))
    digests = {launched.log(f"worker-{rank}").rpartition(b"sha256=")[2] for rank in range(2)}
    assert len(digests) == 1, "the last steps were dist_sync's"
