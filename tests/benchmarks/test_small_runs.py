"""Benchmarks that one small run shows: each reports what was asked for."""

import importlib.util
import json

import pytest

from dmltrain.kvstore import codec
from tests.benchmarks.as_a_user import figures, run


@pytest.mark.thorough
def test_balance_compares_both_kinds_of_jobs():
    small = "balance.py --workers 2 --batch 4 --steps 12 --epochs 2 --turns 1"
    slow, equal = figures(small, "--network", "--network mlp")["measured"]
    assert (slow["factor"], slow["ceiling"], equal["factor"], equal["ceiling"]) == (2.0, 1.5, 1.0, 1.0)
    for each in (slow, equal):
        assert set(each["speeds"]) == {"equal parts", "--balance"} and each["ratio"] > 0


@pytest.mark.thorough
def test_both_backends_have_their_figures(tmp_path):
    for framework in ("torch", "mxnet"):
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    words = f"backends.py --num-examples 256 --epochs 2 --log-dir {tmp_path / 'logs'} --cases"
    results = figures(words, "LeNet, local")["cases"]["LeNet, local"]
    assert set(results) == {"torch", "mxnet"}
    for backend, [outcome] in results.items():
        assert outcome["images_per_second"] > 0 and outcome["epoch_seconds"] > 0 and outcome["memory"] > 50
        assert 0 <= outcome["accuracy"] <= 1
        assert f"--backend {backend}" in (tmp_path / f"logs/lenet-local-{backend}-1/worker-0.log").read_text()


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.thorough), "2"])
def test_every_codec_has_its_figures(processes):
    result = figures(f"codecs.py --megabytes 4 --repeats 1 --processes {processes}", how=run)
    rates = result["gigabytes_per_cpu_second"]
    assert set(rates) == {"memcpy", *(each.name for each in codec.TABLE)}
    for name, columns in rates.items():
        assert set(columns) >= {"decode", "add"} and ("encode" in columns) == (name != "memcpy")
        assert all(0 < figure < 1000 for figure in columns.values())
    assert result["bytes_to_float32"]["2bit"] == pytest.approx(17 / 256, rel=0.01)


@pytest.mark.thorough
def test_each_loss_is_a_change_of_view():
    done = run("views.py --members 2,5 --servers 2 --turns 3 --format json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["changes"]
    assert [row["members"] for row in found] == [2, 5]
    assert all(0 < row["elapsed"]["min"] <= row["elapsed"]["median"] < 30_000 for row in found)
    assert all(row["scheduler"] >= 0 for row in found)
    assert "view 2 after op 0: workers 0\n" in done.stderr and "view 4 after op 0: workers 0, 1\n" in done.stderr
