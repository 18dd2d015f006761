"""Scripts of torch.distributed that are not changed, over the servers: --torch-backend dmltrain, and torchrun."""

import os
import secrets
from pathlib import Path

import pytest
import torch.distributed as dist

from dmltrain.backends.torch import process_group
from dmltrain.backends.torch.process_group import beside
from dmltrain.base.errors import UserError
from tests.forked_job import forker
from tests.launch.conftest import carriers
from tests.running_job import ROOT
from tests.waiting import wait_for

SCRIPTS = ROOT / "tests/programs/torch_scripts"
ALONE = Path(__file__).parent / "programs/torch_alone.py"
IN_PLACE = ROOT / "dmltrain/torch/__main__.py"  # python -m dmltrain.torch


def meeting():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def environment(store, rank):
    """As torchrun's, which has a store for its workers."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": store.port}
    return {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **{k: str(v) for k, v in places.items()},
    }


def run_alone(folder, *command):
    """Two workers without a launcher of ours: their exit codes and outputs, when nothing is left of them."""
    store, mark = meeting(), secrets.token_hex(8)
    logs = [folder / f"alone-{rank}.log" for rank in range(2)]
    own = [{**os.environ, **environment(store, rank), "TEST_MARK": mark} for rank in range(2)]
    started = [forker().fork([*map(str, command)], each, log, folder) for each, log in zip(own, logs, strict=True)]
    codes = [process.wait(120) for process in started]
    wait_for(lambda: not carriers(f"TEST_MARK={mark}"), "the end of what they have started")
    return codes, [log.read_text() for log in logs]


@pytest.mark.parametrize(
    ("script", "asked", "gloo"),
    [
        ("nano_gpt.py", '"gloo"', ()),
        ("classification.py", '"nccl"', ("--dist-backend", "gloo")),
        ("timm_train.py", "", ()),
    ],
)
def test_losses_are_those_over_gloo_and_no_line_is_changed(start_forked, tmp_path, script, asked, gloo):
    store = meeting()
    ranks = {f"worker-{rank}": environment(store, rank) for rank in range(2)}
    job = start_forked(IN_PLACE, SCRIPTS / script, place=lambda name: ([], ranks.get(name, {})))
    job.succeed()
    said, *losses = job.output("worker-0").splitlines()
    assert said == f'dmltrain: init_process_group({asked}) takes the backend "dmltrain"', job.outputs()
    assert losses and run_alone(tmp_path, SCRIPTS / script, *gloo) == ([0, 0], ["\n".join([*losses, ""]), ""])
    assert not [name for name in ("worker-1", "server-0") if job.output(name)], job.outputs()


@pytest.mark.parametrize(("killed", "codes"), [(None, [0, 0]), (0, [-9, 1]), (1, [1, -9])])
def test_servers_run_beside_the_workers_of_another_launcher_and_end_with_them(tmp_path, killed, codes):
    found, outputs = run_alone(tmp_path, ALONE, killed)
    assert found == codes, outputs
    summed = outputs if killed is None else [outputs[killed]]  # the other one may not have got the sum before
    assert all("sum 2.0 True" in each for each in summed), "it has gone over the servers"
    if killed is not None:
        assert "DistBackendError" in outputs[1 - killed] and f"worker {killed}" in outputs[1 - killed], outputs


@pytest.mark.parametrize(
    ("words", "own", "said"),
    [
        ("here, but not for worker 0", b"ab", "cd"),
        ("not set here, but for worker 0", b"", ""),
    ],
)
def test_all_workers_have_the_key_of_their_user_or_none(tmp_path, monkeypatch, words, own, said):
    (tmp_path / "key").write_bytes(own)
    monkeypatch.setenv("DMLTRAIN_KEY_FILE", str(tmp_path / "key") if own else "")
    with pytest.raises(UserError, match=words):
        beside._key(said)
    assert beside._key("" if own else "cd") == (own or b"cd")


def test_protection_is_refused_before_servers_start(monkeypatch):
    monkeypatch.setenv("DMLTRAIN_WIRE", "tls")
    with pytest.raises(UserError, match="not those of gloo"):
        process_group.joined(pytest.fail, 0, 2, dist.HashStore())


def test_the_address_of_worker_0_must_be_one_that_other_hosts_reach(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    workers = [{"identity": name, "address": "127.0.0.1"} for name in ("a", "b")]
    with pytest.raises(UserError, match="MASTER_ADDR=localhost is 127.0.0.1 on its own host"):
        beside._begin(workers)
