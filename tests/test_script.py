"""What a script asks of dmltrain.distribute where it trains alone: mistakes are explained, all else is as before."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dmltrain
from dmltrain.base import env
from dmltrain.base.errors import UserError
from dmltrain.kvstore import rules
from tests.copied_tree import search_path

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("DMLC_ROLE", "MXNET_UPDATE_ON_KVSTORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # distribute replaces it


def of(kind, **choices):
    return kind, choices


TWO_BIT = {"type": "2bit", "threshold": 0.5}


@pytest.mark.parametrize(
    "given, names",
    [
        (of("dist"), ["unknown kvstore 'dist'", "one of local, device, dist_sync, "]),
        (of(["dist_sync"]), ["unknown kvstore ['dist_sync']", "one of local, "]),
        (of("dist_sync", compression="1bit"), ["compression='1bit'", "no type '1bit'", "none, bf16, fp16, int8, 2bit"]),
        (of("dist_sync", compression=None), ["compression=None", "no type None", "none, bf16, "]),
        (of("dist_sync", compression={"threshold": 0.5}), ["compression={'threshold': 0.5}", "no type None"]),
        (of("dist_sync", compression={"type": "2bit", "ratio": 0.1}), ["2bit", "no parameter 'ratio'", "'threshold'"]),
        (of("dist_sync", compression={"type": "int8", 3: 0, "bits": 4}), ["int8", "no parameter 3", "has none"]),
        (of("dist_sync", compression={"type": "topk", "ratio": "1%"}), ["topk", "ratio is '1%'", "from 1e-09 to 1"]),
        (of("local", compression="int8"), ["compression='int8'", "kvstore='local'", "leave compression out"]),
        (of("dist_async", staleness=4), ["staleness", "dist_ssp", "this is dist_async", "leave staleness out"]),
        (of("dist_ssp", staleness=-1), ["staleness -1", "0 or more"]),
        (of("dist_ssp", staleness="4"), ["staleness '4'", "0 or more"]),
        (of("dist_sync", local_steps=4), ["local_steps", "dist_local", "this is dist_sync", "leave local_steps out"]),
        (of("dist_local", local_steps=0), ["local_steps 0", "at least 1"]),
        (of("dist_local", local_steps="5"), ["local_steps '5'", "at least 1"]),
        (of("dist_local", outer_lr="1"), ["outer_lr '1'", "above 0"]),
        (of("dist_local", outer_momentum=1), ["outer_momentum 1", "from 0 to below 1"]),
        (of("dist_local", staleness=3), ["staleness", "dist_ssp", "this is dist_local"]),
        (of("dist_local", update_on_kvstore=True), ["update_on_kvstore=True", "each worker's own optimizer", "leave"]),
        (of("dist_local", compression=TWO_BIT), ["threshold=0.5", "differences of weights", "threshold out"]),
        (of("dist_local", factors=32), ["factors=32", "kvstore='dist_local'", "kvstore='dist_sync'", "factors out"]),
        (of("dist_sync", factors="auto"), ["factors='auto'", "largest number of samples"]),
        (of("dist_sync", factors=True), ["factors=True", "largest number of samples"]),
        (of("dist_sync", factors=-3), ["factors=-3", "largest number of samples"]),
        (of("dist_ssp", factors=32), ["factors=32", "kvstore='dist_ssp'", "kvstore='dist_sync'", "leave factors out"]),
        (of("dist_sync", factors=32, update_on_kvstore=True), ["factors=32", "servers", "update_on_kvstore=False"]),
        (of("dist_sync", server_shares="link"), ["server_shares='link'", "equal, links"]),
        (of("local", server_shares="links"), ["server_shares='links'", "'local'", "'dist_sync' or 'dist_local'"]),
        (
            of("dist_sync", server_shares="links", compression=TWO_BIT),
            ["server_shares='links'", "compression='2bit'", "compression='none' or 'bf16' or 'fp16'"],
        ),
        (of("dist_sync", transport="udp"), ["transport='udp'", "auto, tcp, shm"]),
        (of("dist_sync", host_sum=False), ["host_sum=False", "auto, off"]),
        (of("dist_sync", server_snapshot=0), ["server_snapshot=0", "needs update_on_kvstore=True"]),
        (of("dist_sync", batch="each"), ["batch='each'", "constant, per-worker, per-worker-scaled-lr"]),
        *(
            (of("dist_sync", update_on_kvstore=True, server_snapshot=each), [f"server_snapshot={each!r}", "0 or more"])
            for each in (-1, float("inf"), float("nan"), True, "5")
        ),
    ],
)
def test_a_mistake_is_explained_before_anything_starts(given, names):
    kind, choices = given
    with pytest.raises(UserError) as raised:
        dmltrain.distribute(None, None, kind, **choices)
    assert [name for name in names if name not in str(raised.value)] == [], raised.value


@pytest.fixture
def worker(monkeypatch):
    """worker(NAME=value, ...): this process is one of two workers of a job, with these variables as well."""

    def made(**variables):
        for name, value in {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", **variables}.items():
            monkeypatch.setenv(name, value)

    return made


@pytest.mark.parametrize(
    "given, named",
    [
        (of("dist_async", balance=True), "balance=True"),
        (of("dist_ssp", batch="per-worker"), "batch='per-worker'"),
        (of("local"), "kvstore='local'"),
        (of("dist_sync", factors=8), "factors=8"),
        (of("dist_sync", server_shares="links"), "server_shares='links'"),
        (of("dist_sync", broadcast_buffers=True), "broadcast_buffers=True"),
    ],
)
def test_what_a_script_of_an_elastic_job_cannot_have(worker, given, named):
    worker(DMLTRAIN_ELASTIC="1")
    kind, choices = given
    with pytest.raises(UserError, match="--elastic, which does not work with .* or start the job without") as raised:
        dmltrain.distribute(None, None, kind, **choices)
    reason = rules.NOT_ELASTIC.get(named.partition("=")[0], "")
    assert re.search(f"{named}[:,] .*{reason}", str(raised.value))


@pytest.mark.parametrize("name, value", [("balance", True), ("batch", "per-worker"), ("server_snapshot", 5)])
def test_what_only_an_elastic_job_has(worker, name, value):
    worker()
    with pytest.raises(UserError, match=f"{name}={value!r} needs a job that was started with dmltrain-launch --ela"):
        dmltrain.distribute(None, None, update_on_kvstore=True, **{name: value})


@pytest.mark.parametrize(
    "kind, more", [("dist_sync", {}), ("dist_sync", {"DMLTRAIN_ELASTIC": "1"}), ("dist_local", {})]
)
def test_rules_that_could_never_change_the_kvstore_are_refused(worker, kind, more):
    worker(DMLTRAIN_STRAGGLERS="1", **more)
    with pytest.raises(UserError, match=rf"rule needs the optimizer on the servers: dist_async, .*\(this is {kind}\)"):
        dmltrain.distribute(None, None, kind)


def test_the_environments_choice_of_where_the_optimizer_runs_counts_where_servers_can_run_it(worker, monkeypatch):
    worker(MXNET_UPDATE_ON_KVSTORE="1")
    with pytest.raises(UserError, match="factors=8 does not work with the optimizer on the servers"):
        dmltrain.distribute(None, None, factors=8)
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "1")
    with pytest.raises(UserError, match="outer_momentum 2: expected"):  # and nothing about servers
        dmltrain.distribute(None, None, "dist_local", outer_momentum=2)
    with pytest.raises(UserError, match="factors=8 does not work with kvstore='dist_local'"):
        dmltrain.distribute(None, None, "dist_local", factors=8)


def test_the_user_sees_one_line():
    program = "import dmltrain; dmltrain.distribute(None, None, 'dist_ssp', staleness=-1)"
    alone = {"PYTHONPATH": search_path()}
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
