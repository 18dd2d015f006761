"""benchmarks/ddp.py: every system trains, equal systems have equal weights, mistakes are explained."""

import pytest

from tests.benchmarks.as_a_user import benchmark_module, figures

torch = pytest.importorskip("torch", reason="the comparison with DDP needs torch")


@pytest.mark.thorough
@pytest.mark.timeout(800)  # 110 s side by side with three others
def test_systems_train_and_plain_ones_get_the_weights_of_ddp():
    plain = ["ddp-dmltrain", "dmltrain", "dmltrain-early", "dmltrain-defer"]
    systems = ["ddp", "ddp-powersgd", *plain, "dmltrain-factors"]
    given = f"--networks mlp:0.4:8 --systems {','.join(systems)} --by-layer 0.01"
    result = figures(f"ddp.py {given} --repeats 1 --steps 2 --warm-up 1 --batch 4")
    (network,) = result["networks"]
    assert network["bytes"] == pytest.approx(0.4e6, rel=0.02) and network["bound_seconds"] is None
    rows = {row["system"]: row for row in network["systems"]}
    assert list(rows) == systems and not [doubt for doubt in result["doubts"] if "weights differ" in doubt]
    for row in rows.values():
        assert row["seconds"]["median"] > 0.01, "it sleeps that long"
        assert row["cpu_seconds"] > 0 and row["samples_per_second"] == pytest.approx(8 / row["seconds"]["median"])
        assert row["ratio_to_ddp"]["median"] > 0
    assert [row["weights_as_ddp"] for row in rows.values()] == [True, None, *[True] * 4, None]
    table = benchmark_module("tables.ddp").table(result)
    assert "mlp:0.4:8: 0.4 MB" in table and "DDP, PowerSGD" in table and "0.01 s of sleep in all layers" in table


@pytest.mark.thorough
@pytest.mark.timeout(800)
def test_a_straggler_delays_ddp_and_not_workers_with_paces_of_their_own():
    words = "--networks mlp:0.04:4 --systems ddp,dmltrain-async --repeats 1 --steps 12 --warm-up 1 --batch 4"
    result = figures(f"ddp.py {words} --pause 0.01 --stragglers 0.2:20 --freeze 0.5:0.2")
    ddp, alone = (row["seconds"]["median"] for row in result["networks"][0]["systems"])
    assert not [doubt for doubt in result["doubts"] if "weights differ" in doubt], "as those of unequal workers may"
    assert ddp > 0.01 * (1 + 0.2 * 19), "all wait for the slowest"
    assert alone < 0.9 * ddp, "one worker waits neither for the stragglers nor for the frozen"
    table = benchmark_module("tables.ddp").table(result)
    assert "20 times as long with a probability of 0.2" in table and "sleeps for 0.5 s after every 0.2 s" in table


@pytest.mark.parametrize("name, classes, sample", [("resnet-20", 10, (3, 32, 32)), ("mlp:0.04:4", 71, (71,))])
def test_networks_have_their_first_weights_from_the_seed(name, classes, sample):
    networks = benchmark_module("contest.networks")
    made, again = networks.make(name), networks.make(name, by_layer=0.002)
    assert (made.classes, made.sample) == (classes, sample)
    assert all(map(torch.equal, made.module.parameters(), again.module.parameters()))
    images = torch.zeros(2, *sample)
    torch.testing.assert_close(made.module.eval()(images), again.module.eval()(images))


def test_a_pause_is_in_forward_and_backward(monkeypatch):
    networks, slept = benchmark_module("contest.networks"), []
    monkeypatch.setattr(networks.time, "sleep", slept.append)
    made = networks.make("mlp:0.04:4", by_layer=0.6)
    loss = made.module(torch.ones(1, *made.sample)).sum()
    assert slept == pytest.approx([0.1, 0.1])
    loss.backward()
    assert slept == pytest.approx([0.1, 0.1, 0.2, 0.2])


def test_the_same_steps_straggle_in_each_system_and_one_host_freezes_in_time(monkeypatch):
    unequal, slept = benchmark_module("contest.unequal"), []
    monkeypatch.setattr(unequal.time, "sleep", slept.append)

    def sleeps(rank, **freeze):
        slept.clear()
        worker = unequal.Unequal(rank, 0.1, 0.5, 10.0, freeze.get("freeze"))
        for step in range(40):
            worker.sleep(step, trained=step / 2)
        return list(slept)

    first = sleeps(0)
    assert sleeps(0) == first != sleeps(1) and set(first) == {0.1, 1.0}
    frozen = sleeps(1, freeze=(2.0, 8.0))
    late = [step for step, (a, b) in enumerate(zip(sleeps(1), frozen, strict=True)) if b == pytest.approx(a + 2)]
    assert late == [16, 32], "after 8 and 16 s"
    assert sleeps(0, freeze=(2.0, 8.0)) == first
