"""Which GPUs of a host each of its workers gets, where the host alone knows them."""

from __future__ import annotations

import pytest

from launch.agent.devices import share
from launch.job.host import Host
from launch.job.placement import gpus_of
from launch.job.role import WORKER


def worker(local: int, workers: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(workers)}


@pytest.mark.parametrize("workers", range(1, 8))
@pytest.mark.parametrize("devices", [(), ("0",), ("0", "1", "4"), ("GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e")])
def test_workers_share_as_with_gpus_in_a_hosts_file(workers: int, devices: tuple[str, ...]):
    host = Host("h1", gpus=devices)
    placed = [(WORKER, rank, host) for rank in range(workers)]
    for rank in range(workers):
        expected = gpus_of(placed, rank, host)
        found = share(",".join(devices), worker(rank, workers))
        assert found == ({"CUDA_VISIBLE_DEVICES": ",".join(expected)} if expected else {})


def test_the_users_own_choice_and_other_processes_stay_as_they_are():
    assert share("0,1", {**worker(0, 2), "CUDA_VISIBLE_DEVICES": "7"}) == {}
    assert share("0,1", {}) == {}
