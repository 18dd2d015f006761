"""Scripts of torch.distributed that are not changed, over the servers: --torch-backend dmltrain, and torchrun."""

import os

import pytest
import torch.distributed as dist

from tests.forked_job import forker
from tests.running_job import ROOT

SCRIPTS = ROOT / "tests/programs/torch_scripts"
IN_PLACE = ROOT / "dmltrain/torch.py"  # python -m dmltrain.torch


def environment(store, rank):
    """As torchrun's, which has a store for its workers."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": store.port}
    return {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **{k: str(v) for k, v in places.items()},
    }


def own_losses(folder, script, *words):
    """What the script prints over gloo."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [folder / f"gloo-{rank}.log" for rank in range(2)]
    started = [
        forker().fork([str(SCRIPTS / script), *words], {**os.environ, **environment(store, rank)}, log, folder)
        for rank, log in enumerate(logs)
    ]
    assert [process.wait(120) for process in started] == [0, 0], [log.read_text() for log in logs]
    return logs[0].read_text().splitlines()


@pytest.mark.parametrize(
    ("script", "asked", "gloo"),
    [
        ("nano_gpt.py", '"gloo"', ()),
        ("classification.py", '"nccl"', ("--dist-backend", "gloo")),
        ("timm_train.py", "", ()),
    ],
)
def test_losses_are_those_over_gloo_and_no_line_is_changed(start_forked, tmp_path, script, asked, gloo):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = {f"worker-{rank}": environment(store, rank) for rank in range(2)}
    job = start_forked(IN_PLACE, SCRIPTS / script, place=lambda name: ([], ranks.get(name, {})))
    job.wait()
    said, *losses = job.output("worker-0").splitlines()
    assert said == f'dmltrain: init_process_group({asked}) takes the backend "dmltrain"', job.outputs()
    assert losses and losses == own_losses(tmp_path, script, *gloo)
    assert not [name for name in ("worker-1", "server-0") if job.output(name)], job.outputs()
