"""What a script asks of dmltrain.distribute where it trains alone: mistakes are explained, all else is as before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dmltrain
from dmltrain import env
from dmltrain.errors import UserError

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("DMLC_ROLE", "MXNET_UPDATE_ON_KVSTORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # distribute replaces it


@pytest.mark.parametrize(
    "kind, choices, message",
    [
        ("dist", {}, "unknown kvstore 'dist'; choose one of local, device, dist_sync, "),
        (["dist_sync"], {}, "unknown kvstore ['dist_sync']; choose one of local, "),
        (
            "dist_sync",
            {"compression": "1bit"},
            "compression='1bit': gradient compression has no type '1bit'; the types are none, bf16, fp16, int8, 2bit, ",
        ),
        ("dist_sync", {"compression": None}, "compression=None: gradient compression has no type None; the types are "),
        (
            "dist_sync",
            {"compression": {"threshold": 0.5}},
            "compression={'threshold': 0.5}: gradient compression has no type None; the types are none, ",
        ),
        (
            "dist_sync",
            {"compression": {"type": "2bit", "ratio": 0.1}},
            "compression={'type': '2bit', 'ratio': 0.1}: gradient compression 2bit has no parameter 'ratio'; the only "
            "one is 'threshold'",
        ),
        (
            "dist_sync",
            {"compression": {"type": "int8", 3: 0, "bits": 4}},
            "compression={'type': 'int8', 3: 0, 'bits': 4}: gradient compression int8 has no parameter 3; it has none",
        ),
        (
            "dist_sync",
            {"compression": {"type": "topk", "ratio": "1%"}},
            "compression={'type': 'topk', 'ratio': '1%'}: gradient compression topk: ratio is '1%', expected a number "
            "from 1e-09 to 1",
        ),
        (
            "local",
            {"compression": "int8"},
            "compression='int8' needs a distributed kvstore; kvstore='local' sends nothing: leave compression out",
        ),
        (
            "dist_async",
            {"staleness": 4},
            "staleness is an option of kvstore dist_ssp; this is dist_async: use dist_ssp, or leave staleness out",
        ),
        ("dist_ssp", {"staleness": -1}, "staleness -1: expected 0 or more clocks"),
        ("dist_ssp", {"staleness": "4"}, "staleness '4': expected 0 or more clocks"),
        (
            "dist_sync",
            {"local_steps": 4},
            "local_steps is an option of kvstore dist_local; this is dist_sync: use dist_local, or leave local_steps "
            "out",
        ),
        ("dist_local", {"local_steps": 0}, "local_steps 0: expected a whole number of steps, at least 1"),
        ("dist_local", {"local_steps": "5"}, "local_steps '5': expected a whole number of steps, at least 1"),
        ("dist_local", {"outer_lr": "1"}, "outer_lr '1': expected a number above 0"),
        ("dist_local", {"outer_momentum": 1}, "outer_momentum 1: expected a number from 0 to below 1"),
        ("dist_local", {"staleness": 3}, "staleness is an option of kvstore dist_ssp; this is dist_local"),
        (
            "dist_local",
            {"update_on_kvstore": True},
            "update_on_kvstore=True: with kvstore='dist_local' each worker's own optimizer makes the steps: leave "
            "update_on_kvstore out",
        ),
        (
            "dist_local",
            {"compression": {"type": "2bit", "threshold": 0.5}},
            "compression's threshold=0.5 is compared with gradients, and kvstore='dist_local' sends differences of "
            "weights: leave compression's threshold out, the levels then adapt",
        ),
        (
            "dist_local",
            {"factors": 32},
            "factors=32 does not work with kvstore='dist_local': use kvstore='dist_sync', or leave factors out",
        ),
        ("dist_sync", {"factors": "auto"}, "factors='auto': expected the largest number of samples of a worker's step"),
        ("dist_sync", {"factors": True}, "factors=True: expected the largest number of samples of a worker's step"),
        ("dist_sync", {"factors": -3}, "factors=-3: expected the largest number of samples of a worker's step"),
        (
            "dist_ssp",
            {"factors": 32},
            "factors=32 does not work with kvstore='dist_ssp': use kvstore='dist_sync', or leave factors out",
        ),
        (
            "dist_sync",
            {"factors": 32, "update_on_kvstore": True},
            "factors=32 does not work with the optimizer on the servers: use update_on_kvstore=False, or leave factors "
            "out",
        ),
        ("dist_sync", {"server_shares": "link"}, "server_shares='link': expected one of equal, links"),
        (
            "local",
            {"server_shares": "links"},
            "server_shares='links' does not work with kvstore='local': use kvstore='dist_sync' or 'dist_local', or "
            "leave server_shares out",
        ),
        (
            "dist_sync",
            {"server_shares": "links", "compression": {"type": "2bit", "threshold": 1.0}},
            "server_shares='links' does not work with compression='2bit', which keeps residuals: use "
            "compression='none' or 'bf16' or 'fp16', or leave server_shares out",
        ),
        ("dist_sync", {"transport": "udp"}, "transport='udp': expected one of auto, tcp, shm"),
        ("dist_sync", {"host_sum": False}, "host_sum=False: expected one of auto, off"),
    ],
)
def test_a_mistake_is_explained_before_anything_starts(kind, choices, message):
    with pytest.raises(UserError) as raised:
        dmltrain.distribute(None, None, kind, **choices)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "kind, choices, message",
    [
        ("dist_local", {}, "this is kvstore='dist_local': use these, or start it without --elastic"),
        ("dist_async", {"balance": True}, "this is balance=True: use these, or start it without --elastic"),
        ("dist_ssp", {"batch": "per-worker"}, "this is batch='per-worker': use these, or start it without --elastic"),
        ("local", {}, "this is kvstore='local': use these"),
        ("dist_sync", {"compression": {"type": "2bit", "threshold": 0.5}}, "this is threshold=0.5: use these"),
        ("dist_sync", {"factors": 8}, "this is factors=8: use these"),
        ("dist_sync", {"server_shares": "links"}, "this is server_shares='links': use these"),
    ],
)
def test_what_a_script_of_an_elastic_job_cannot_have(monkeypatch, kind, choices, message):
    for name, value in (("DMLC_ROLE", "worker"), ("DMLC_NUM_WORKER", "2"), ("DMLTRAIN_ELASTIC", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match="this job was started with --elastic, which needs kvstore='dist_sync'"
    ) as raised:
        dmltrain.distribute(None, None, kind, **choices)
    assert message in str(raised.value)


@pytest.mark.parametrize("name, value", [("balance", True), ("batch", "per-worker"), ("server_snapshot", 5)])
def test_what_only_an_elastic_job_has(monkeypatch, name, value):
    monkeypatch.setenv("DMLC_ROLE", "worker")
    monkeypatch.setenv("DMLC_NUM_WORKER", "2")
    with pytest.raises(UserError, match=f"{name}={value!r} needs a job that was started with dmltrain-launch --ela"):
        dmltrain.distribute(None, None, update_on_kvstore=True, **{name: value})


@pytest.mark.parametrize(
    "kind, elastic",
    [("dist_sync", ""), ("dist_sync", "1"), ("dist_local", "")],
)
def test_rules_that_could_never_change_the_kvstore_are_refused(monkeypatch, kind, elastic):
    more = {"DMLTRAIN_ELASTIC": elastic} if elastic else {}
    for name, value in {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "DMLTRAIN_STRAGGLERS": "1", **more}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as raised:
        dmltrain.distribute(None, None, kind)
    needed = "the optimizer on the servers: dist_async, dist_ssp, or dist_sync with update_on_kvstore"
    assert str(raised.value).startswith(f"--rule needs {needed}")
    assert str(raised.value).endswith(f"(this is {kind}): use that, or start the job without --rule")


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan"), True, "5"])
def test_snapshots_need_their_seconds(seconds):
    with pytest.raises(UserError, match=f"server_snapshot={seconds!r}: expected seconds, 0 or more"):
        dmltrain.distribute(None, None, update_on_kvstore=True, server_snapshot=seconds)


def test_snapshots_need_servers_that_step():
    with pytest.raises(UserError, match="server_snapshot=0 needs update_on_kvstore=True: else servers keep nothing"):
        dmltrain.distribute(None, None, server_snapshot=0)


def test_an_unknown_kind_of_batch():
    with pytest.raises(UserError, match="batch='each': expected one of constant, per-worker, per-worker-scaled-lr"):
        dmltrain.distribute(None, None, batch="each")


def test_the_environments_choice_of_where_the_optimizer_runs_counts_too(monkeypatch):
    monkeypatch.setenv("DMLC_ROLE", "worker")
    monkeypatch.setenv("DMLC_NUM_WORKER", "1")
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "1")
    with pytest.raises(UserError, match="factors=8 does not work with the optimizer on the servers"):
        dmltrain.distribute(None, None, factors=8)


def test_it_does_not_count_where_no_server_can_run_it(monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "1")
    with pytest.raises(UserError, match="outer_momentum 2: expected"):  # and nothing about servers
        dmltrain.distribute(None, None, "dist_local", outer_momentum=2)
    with pytest.raises(UserError, match="factors=8 does not work with kvstore='dist_local'"):
        dmltrain.distribute(None, None, "dist_local", factors=8)


def test_the_user_sees_one_line():
    program = "import dmltrain; dmltrain.distribute(None, None, 'dist_ssp', staleness=-1)"
    alone = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env.inherited(**alone))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "-c: error: staleness -1: expected 0 or more clocks\n"


def test_alone_the_choices_have_no_effect():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for choices in (
        {"compression": "bf16", "factors": 8, "server_shares": "links"},
        {"kvstore": "dist_ssp", "staleness": 0, "compression": {"type": "2bit", "threshold": 1.0}},
        {"kvstore": "local", "defer": True},
    ):
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = dmltrain.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5), **choices)
        model(torch.tensor([[0.25, 0.5]])).sum().backward()
        optimizer.step()
        assert model.weight.tolist() == [[0.875, 0.75]]
