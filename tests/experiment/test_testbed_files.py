"""The experiments for two cores, for the test bed and on staleness: their cells, tables and plots are as they say."""

from pathlib import Path

import pytest

from dmltrain.experiment import cli, file
from dmltrain.experiment.results.presentation import presentation

EXPERIMENTS = Path(__file__).parents[2] / "examples/experiments"
FILES = sorted([*EXPERIMENTS.glob("*/*.yaml"), *EXPERIMENTS.glob("ssp-*.yaml")])
CELLS = {
    "ssp-speed.yaml": 64,
    "ssp-convergence.yaml": 32,
    "ssp-speed-8-hosts.yaml": 44,
    "ssp-convergence-8-hosts.yaml": 9,
    "slow-links.yaml": 5,
    "stragglers.yaml": 4,
    "cifar10-inception-5-hosts.yaml": 7,
    "local-steps.yaml": 10,
    "ssp-accuracy.yaml": 4,
    "mnist-lenet-on-cpu.yaml": 5,
    "multi-gpu-on-cpu.yaml": 9,
    "resnet50-profile-on-cpu.yaml": 4,
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_file_has_its_cells_columns_and_plots(path, capsys):
    assert cli.main([str(path), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{CELLS[path.name]} cells of ")
    shown = presentation(file.load(path))
    assert shown.columns and shown.plots


@pytest.mark.parametrize("small", [(), ("--small",)])
def test_each_staleness_has_its_kvstore(small, capsys):
    assert cli.main([str(EXPERIMENTS / "ssp-speed.yaml"), "--dry-run", *small]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    for command in commands:
        nodes, servers = (command.partition(f" {letter} ")[2].split()[0] for letter in ("-n", "-s"))
        assert servers == ("0" if nodes == "1" else nodes)
        store = command.partition("--kv-store ")[2].split()[0]
        assert (store == "local") == (nodes == "1") and (store == "dist_ssp") == ("--staleness" in command)
        bound = command.partition("staleness=")[2].split()[0].split(",")[0].split("-")[0]
        expected = {"0": "dist_sync", "infinity": "dist_async", "1": "dist_ssp", "3": "dist_ssp", "10": "dist_ssp"}
        assert store == expected.get(bound, "local"), command
