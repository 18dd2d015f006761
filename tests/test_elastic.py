"""Elastic jobs of real processes, which lose workers at exact moments."""

import json
import re
import signal

import pytest

from launch.certificate import new
from tests.elastic_job import AUDIT, PREFIX, digests, each_sample_once, make_forker, make_jobs, validation  # noqa: F401

thorough = pytest.mark.thorough

# Ops of a job of 4 workers with the defaults of programs/elastic.py: 1 to 7 rounds, 8 and 9 barriers, 10 comparison of
# weights, 11 save, 12 validation; 13 to 24 the same. Each round has three pushes: two buckets and a receipt.
MOMENTS = {
    "in the first round": "1:before:pushpull:1:kill",
    "in the forward pass": "1:before:train_step:3:kill",
    "between two pushes": "1:after:pushpull:7:kill",
    "between push and value": "1:after:pushpull:9:kill",
    "with values that it has not recognised": "1:before:complete:4:kill",
    "after a round": "1:after:complete:3:kill",
    "in the last round of an epoch": "1:before:pushpull:21:kill",
    "in a barrier": "3:before:barrier:2:kill",
    "in validation": "1:before:evaluate:5:kill",
    "as the leader in mid-step": "0:after:pushpull:9:kill",
    "as the leader before the checkpoint": "0:before:write:1:kill",
    "as the leader in the middle of the checkpoint": "0:before:put:2:kill",
    "as the leader after the checkpoint": "0:after:write:2:kill",
    "in the last op": "2:before:complete:24:kill",
}
IN_TEST = ("between push and value", "as the leader in the middle of the checkpoint")


def cases(found, in_test):
    return [pytest.param(each, id=name, marks=[] if name in in_test else thorough) for name, each in found.items()]


def test_without_a_fault_it_is_bit_for_bit_the_plain_job(jobs):
    plain = jobs.start("", *PREFIX, elastic=None)
    elastic = jobs.start("", *PREFIX, *AUDIT)
    elastic.succeed()
    each_sample_once(elastic)
    plain.succeed()
    assert digests(plain, range(4)) == digests(elastic, range(4))
    assert validation(plain, 0) == validation(elastic, 3)


@pytest.mark.parametrize("fault", cases(MOMENTS, IN_TEST))
def test_kill_9(jobs, fault):
    jobs.survives(fault, late="complete:24" in fault)


@pytest.mark.thorough
@pytest.mark.parametrize(("network", "says"), [(["resnet", "--num-layers", "8"], True), (["mlp"], False)])
def test_lost_statistics_are_said(jobs, network, says):
    job = jobs.start("1:after:pushpull:7:kill", "--network", *network, workers=2)
    assert job.wait()["worker-0"] == 0, job.outputs()
    said = "Batch-norm statistics of worker 1 since the last merge are lost; weights do not need them"
    assert (said in job.output("worker-0")) == says, job.outputs()


TOGETHER = {
    "two at the same moment": "1:before:complete:4:kill,2:before:complete:4:kill",
    "two between pushes": "1:after:pushpull:7:kill,3:after:pushpull:8:kill",
    "the leader and another": "0:after:pushpull:9:kill,1:before:complete:3:kill",
    "down to one": "1:before:complete:3:kill,0:before:complete:5:kill,3:after:pushpull:24:kill",
    "down to one in validation": "0:before:evaluate:5:kill,1:before:evaluate:6:kill,2:before:evaluate:7:kill",
}


@pytest.mark.parametrize("faults", cases(TOGETHER, ()))
def test_several_die(jobs, faults):
    jobs.survives(faults)


WHILE_THE_VIEW_CHANGES = {
    "before its answer": "before:freeze:1",
    "after its answer": "after:freeze:1",
    "before it has the view": "before:announce:2",
    "with a view that it has not entered": "after:announce:2",
    "before it enters": "before:enter:1",
    "after it has entered": "after:enter:2",
}


@pytest.mark.parametrize("member", [0, 2])
@pytest.mark.parametrize("moment", cases(WHILE_THE_VIEW_CHANGES, ()))
def test_a_second_death_while_the_view_changes(jobs, moment, member):
    jobs.survives(f"1:before:complete:4:kill,{member}:{moment}:kill")


@thorough
def test_each_of_the_others_dies_at_another_moment_of_the_change(jobs):
    faults = ["1:before:complete:4:kill", "2:after:freeze:1:kill", "0:after:announce:2:kill", "3:after:enter:3:kill"]
    jobs.survives(",".join(faults), workers=5)


LATE = {
    "the first of two": "1:before:pushpull:1:kill,0:after:arm:1:until/after/announce/2",
    "the second of three": "1:before:train_step:4:kill,2:after:enter:2:kill,"
    "0:after:train_step:3:until/after/announce/3",
}


@pytest.mark.parametrize("faults", cases(LATE, ()))
def test_a_leader_that_learns_of_two_views_at_once_goes_through_both(jobs, faults):
    """The first round is dealt in the first view, and views.json has every view."""
    lost = {int(each[0]) for each in faults.split(",") if each.endswith("kill")}
    jobs.survives(faults, lost=lost)


@thorough
def test_a_death_at_the_end_does_not_matter(jobs):
    """Before and after the servers know that the worker leaves. Perhaps the others are at their end as well."""
    jobs.survives("1:before:close:1:kill,2:before:bye:1:kill", late=True)


def test_with_too_few_left_all_end_and_name_who_was_lost(jobs):
    job = jobs.start("1:before:complete:4:kill", workers=2, servers=1, elastic=2)
    assert job.wait() == {"scheduler-0": 75, "server-0": 75, "worker-0": 75, "worker-1": -signal.SIGKILL}
    text = r"worker 1 on \S+ was lost: .*; 1 worker is left, and --min-workers is 2"
    for name in ("scheduler-0", "server-0", "worker-0"):
        assert re.search(text, job.output(name)), job.outputs()
    assert "Traceback" not in job.outputs()


@pytest.mark.parametrize("moment", ["before:training:9", pytest.param("before:evaluate:5", marks=thorough)])
def test_a_mistake_of_its_own_ends_only_this_worker(jobs, moment):
    job = jobs.survives(f"2:{moment}:own", code=1)
    assert "RuntimeError: this worker's own mistake" in job.output("worker-2")
    assert "Traceback" not in "".join(job.output(f"worker-{member}") for member in (0, 1, 3))


def test_a_mistake_of_the_user_ends_the_job(jobs):
    job = jobs.start("1:before:train_step:3:user", workers=2, servers=1)
    codes = job.wait()
    assert codes == {"scheduler-0": 75, "server-0": 75, "worker-0": 75, "worker-1": 2}, job.outputs()
    for name in codes:
        assert "a mistake of the user" in job.output(name)
    assert "Traceback" not in job.outputs()


def test_a_stopped_worker_is_removed_and_says_so_when_it_goes_on(jobs):
    job = jobs.start("1:before:complete:4:stop", *AUDIT, env={"DMLTRAIN_HEARTBEAT_TIMEOUT": "3"})
    job.wait_for_line("worker-0", "Removed from the job: worker 1")
    job.processes["worker-1"].send_signal(signal.SIGCONT)
    codes = job.wait()
    assert codes.pop("worker-1") == 75 and set(codes.values()) == {0}, job.outputs()
    assert re.search(r"error: removed from the job: worker 1 on \S+ missed heartbeats for \d s", job.output("worker-1"))
    assert "Traceback" not in job.outputs()
    assert len(digests(job, (0, 2, 3))) == 1


@thorough
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_each_transport(jobs, transport):
    jobs.survives("1:after:pushpull:8:kill", env={"DMLTRAIN_TRANSPORT": transport}, workers=3)


@thorough
@pytest.mark.parametrize("wire", ["tls", "auth"])
def test_each_wire(jobs, wire, tmp_path):
    certificate = tmp_path / "certificate"
    certificate.write_bytes(new()[0])
    more = {"DMLTRAIN_TRANSPORT": "tcp", "DMLTRAIN_WIRE": wire, "DMLTRAIN_CERTIFICATE_FILE": str(certificate)}
    jobs.survives("1:after:pushpull:8:kill", env=more, workers=3)


COMPRESSED_MOMENTS = ("between two pushes", "between push and value", "with values that it has not recognised")


CODECS = {"bf16": "tcp", "fp16": "shm", "int8": "tcp", "2bit": "shm", "topk": "tcp"}  # -> transport


@pytest.mark.parametrize("moment", COMPRESSED_MOMENTS)
@pytest.mark.parametrize("codec", CODECS)
@thorough
def test_a_round_that_is_aborted_leaves_nothing_in_residuals(jobs, moment, codec):
    """The replay, where it is not aborted, has the same weights, and residuals in its checkpoints."""
    env = {"DMLTRAIN_TRANSPORT": CODECS[codec]}
    job = jobs.survives(MOMENTS[moment], "--gc-type", codec, workers=3, env=env)
    says = "Compression: the servers' residuals begin at zero in view 2" in job.output("worker-0")
    assert says == (codec not in ("bf16", "fp16"))


@thorough
def test_a_checkpoint_with_residuals_is_written_by_the_next_leader(jobs):
    jobs.survives(MOMENTS["as the leader in the middle of the checkpoint"], "--gc-type", "int8", workers=3)


# -- refusals ---------------------------------------------------------------------------------------------------------

YET = "error: --elastic does not work with {} yet: leave one of them out"
NEEDS = "error: --elastic needs --kv-store dist_sync, dist_async or dist_ssp"
REFUSED = {
    "--kv-store dist_local": f"{NEEDS} (this is dist_local): use one of these, or start the job without --elastic",
    "--kv-store local": f"{NEEDS} (this is local): use one of these, or start the job without --elastic",
    "--server-snapshot 5": "error: --server-snapshot needs --update-on-kvstore 1: else servers keep nothing",
    "--backend mxnet": "error: --elastic: --backend mxnet cannot do this, because ps-lite ends with the first process "
    "that it loses; use --backend torch",
    "--gc-type 2bit --gc-threshold 0.5": YET.format("--gc-threshold"),
    "--factors auto": YET.format("--factors auto"),
    "--macrobatch-size 16": YET.format("--macrobatch-size"),
    "--data-parts local": YET.format("--data-parts local"),
    "--dtype float16": YET.format("--dtype float16"),
    "--snapshot 5 --model-prefix m": YET.format("--snapshot"),
    "--load-iteration 5 --model-prefix m": YET.format("--load-iteration"),
    "--test-interval 5": YET.format("--test-interval"),
    "--max-iter 5": YET.format("--max-iter"),
    "--skip-broken 1": YET.format("--skip-broken"),
    "--monitor 5": YET.format("--monitor"),
    "--test-io 1": YET.format("--test-io 1"),
    "--snapshot-on-signal 5 --model-prefix m": "error: --snapshot-on-signal is for jobs that are not elastic: remove "
    "it; in an elastic job SIGUSR1 to the agent",
    "--server-shares links": YET.format("--server-shares links"),
}


def refused(job, text, codes=(2,)):
    found = job.wait()
    assert set(found.values()) == set(codes), job.outputs()
    for name in found:
        assert text in job.output(name), job.outputs()
    assert "Traceback" not in job.outputs()


@pytest.mark.parametrize("words", REFUSED)
def test_what_an_elastic_job_cannot_do_is_refused_by_each_process(jobs, words):
    refused(jobs.start("", *words.split(), workers=1, servers=1), REFUSED[words])


def test_shares_by_links_are_refused_from_the_environment_too(jobs):
    job = jobs.start("", workers=1, servers=1, env={"DMLTRAIN_SERVER_SHARES": "links"})
    refused(job, REFUSED["--server-shares links"])


def test_several_problems_are_named_at_once(jobs):
    job = jobs.start("", "--factors", "auto", "--max-iter", "5", workers=1, servers=1)
    refused(job, f"{YET.format('--factors auto')}; --elastic does not work with --max-iter yet")


@pytest.mark.parametrize("option", ["audit there", "replay there", "balance", "batch per-worker", "server-snapshot"])
def test_a_plain_job_has_no_views(jobs, option):
    words = f"--{option}".split() + ["0"] * (option == "server-snapshot")
    job = jobs.start("", *words, workers=1, servers=1, elastic=None)
    refused(
        job, f"error: --{option.removesuffix(' there')} needs a job that was started with dmltrain-launch --elastic"
    )


def test_a_program_of_ones_own_is_refused(jobs):
    job = jobs.start("start", ".", program="phases.py", workers=1, servers=1)
    refused(
        job,
        "error: kvstore.create: this job was started with --elastic, which programs that use the kvstore directly do "
        "not support: start it without --elastic, or use dmltrain.distribute, State and loader",
    )


# -- replays ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(jobs):
    """The views.json of a job of 3 workers that has lost one."""
    job = jobs.start("1:before:complete:4:kill", *AUDIT, workers=3, servers=1)
    job.wait()
    return job.folder / "audit/views.json"


def test_a_replay_of_another_job_lists_what_differs(jobs, recorded):
    job = jobs.start("", "--replay", recorded, "--seed", 3, "--batch-size", 6, workers=2, servers=1)
    refused(
        job,
        f"--replay {recorded}: it is of a job with 3 worker(s) and seed 0, this one has 2 worker(s) and seed 3: start "
        "this job with -n 3 and --seed 0",
        codes=(2, 75),
    )


def base_that_shrinks(text):
    found = json.loads(text)
    found["views"].append({**found["views"][1], "number": 3, "base": 1, "lost": []})
    found["views"][1]["base"] = 3
    return json.dumps(found)


DAMAGES = {
    "view 3 has base 1 after base 3: the file is damaged": base_that_shrinks,
    ": the file is damaged": lambda text: text[: len(text) // 2],
    "No such file or directory; the views.json of a job with --audit was expected": None,
}


def test_damaged_files_are_refused(jobs, recorded):
    text = recorded.read_text()
    for number, (expected, damage) in enumerate(DAMAGES.items()):
        file = recorded.with_name(f"damaged-{number}.json")
        if damage:
            file.write_text(damage(text))
        job = jobs.start("", "--replay", file, workers=3, servers=1)
        refused(job, expected, codes=(2, 75))
        assert f"--replay {file}: " in job.output("worker-0")


def test_a_replay_that_loses_a_worker_ends(jobs, recorded):
    job = jobs.start("2:before:complete:6:kill", "--replay", recorded, workers=3, servers=1)
    codes = job.wait()
    assert codes.pop("worker-2") == -signal.SIGKILL, job.outputs()
    assert codes.pop("worker-1") in (0, 75) and set(codes.values()) == {75}, job.outputs()
    assert "a replay needs all workers of the replayed job: start it again" in job.output("worker-0")


@thorough
def test_a_replay_can_be_replayed(jobs, recorded):
    first = jobs.start("", "--replay", recorded, *AUDIT, workers=3, servers=1)
    first.succeed()
    each_sample_once(first)
    second = jobs.start("", "--replay", first.folder / "audit/views.json", workers=3, servers=1)
    second.succeed()
    assert len(digests(first, (0, 2)) | digests(second, (0, 2))) == 1
    assert "This worker's part has ended: the replay has no later view with this worker" in second.output("worker-1")
