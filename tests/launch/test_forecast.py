"""The forecast: the bounds of every placement, what is read from a program's line, and what is said."""

import json
import math

import pytest

from dmltrain_launch.forecast.forecast import (
    Computing,
    Forecast,
    Links,
    StepReport,
    counts,
    forecast,
    gradients,
    loads,
    step_of,
)
from dmltrain_launch.forecast.text import Outlook, sentences, tables
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.placement import place

V, B = 25e6, 1.25e8  # bytes; bytes/s: 1 Gbit/s
COMPRESSION = {"none": (1.0, 1.0), "bf16": (0.5, 0.5), "fp16": (0.5, 0.5), "int8": (0.252, 0.252)}
COMPRESSION["2bit"] = (17 / 256, 17 / 256)
STEP = StepReport(0.2, 64, V, "resnet-50", compression=COMPRESSION)


def hosts(count: int, **more: object) -> list[Host]:
    return [Host(f"h{number}", **more) for number in range(1, count + 1)]


def links(count: int, speed: float = B, **others: float) -> Links:
    """All of `count` hosts alike, but for the cards of `others`."""
    names = [host.name for host in hosts(count)]
    return Links({(a, b): min(others.get(a, speed), others.get(b, speed)) for a in names for b in names if a != b})


ONE = Computing({"h1": {1: 0.2}})


def expected(
    workers: int, servers: int, machines: int, policy: str = "dmlc", gc_type: str = "none", step: StepReport = STEP
) -> Forecast:
    placed = place(workers, servers, hosts(machines), policy)
    found = forecast(placed, step, ONE, links(machines), gc_type)
    assert found
    return found


# -- the bounds of every placement ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_server_beside_each_worker(n):
    assert expected(n, n, n).communicating == pytest.approx(2 * (n - 1) * V / (n * B))
    assert expected(n, n, n).apart == pytest.approx(expected(n, n, n).communicating), "both fill the card anyway"


@pytest.mark.parametrize(("n", "s"), [(1, 1), (2, 1), (4, 1), (2, 3), (3, 3), (4, 2)])
def test_servers_on_hosts_of_their_own(n, s):
    found = expected(n, s, n + s, "dedicated")
    assert found.communicating == pytest.approx(max(V / B, n * V / (s * B)))
    assert found.apart == pytest.approx(2 * found.communicating), "twice, where results wait for gradients"


def test_what_stays_in_a_host_is_free_and_workers_of_a_host_share_its_card_unless_they_are_summed_there():
    assert expected(4, 2, 1).communicating == 0
    assert gradients(place(2, 1, hosts(2)), STEP) == {("h2", "h1"): V}  # the other worker is beside the server
    two_each = place(4, 1, hosts(3), "dedicated")  # two workers on h1, two on h2, the server on h3
    assert gradients(two_each, STEP) == {("h1", "h3"): 2 * V, ("h2", "h3"): 2 * V}
    assert gradients(two_each, StepReport(0.2, 64, V, summed_in_host=True)) == {("h1", "h3"): V, ("h2", "h3"): V}


def test_the_slowest_card_or_path_counts_and_one_noisy_figure_does_not():
    placed, whole = place(3, 3, hosts(3)), expected(3, 3, 3).communicating
    assert forecast(placed, STEP, ONE, links(3, h2=B / 10)).communicating == pytest.approx(10 * whole)
    path = Links({**links(3).speeds, ("h1", "h3"): B / 20})
    assert forecast(placed, STEP, ONE, path).communicating == pytest.approx(20 * 2 * V / 3 / B)
    noisy = Links({**links(5).speeds, ("h1", "h3"): 1.5 * B})
    assert forecast(place(5, 5, hosts(5)), STEP, ONE, noisy) == expected(5, 5, 5)
    assert forecast(place(2, 2, hosts(2)), STEP, ONE, Links()) is None, "nothing is measured"


def test_a_card_carries_what_the_better_half_of_its_links_do():
    """A path much slower than the best is the network's; what is left differs by the noise of the measurements."""
    speeds = {("h1", "h2"): B, ("h1", "h3"): 0.4 * B, ("h1", "h4"): 0.3 * B, ("h3", "h2"): B}
    assert Links(speeds).seconds({("h1", "h2"): V}) == pytest.approx(V / B)
    noisy = Links({**speeds, ("h1", "h3"): 0.8 * B, ("h1", "h4"): 0.9 * B})
    assert noisy.seconds({("h1", "h2"): V}) == pytest.approx(V / (0.9 * B))


@pytest.mark.parametrize(("gc_type", "factor"), [("bf16", 2), ("int8", 4), ("2bit", 15)])
def test_fewer_bytes(gc_type, factor):
    assert expected(5, 5, 5).apart / expected(5, 5, 5, gc_type=gc_type).apart == pytest.approx(factor, rel=0.02)
    whole = StepReport(0.2, 64, V, compression={"none": (1.0, 1.0), gc_type: (1 / factor, 1.0)})
    alone = expected(2, 1, 3, "dedicated", gc_type, whole)
    assert alone.apart == pytest.approx((1 + 1 / factor) * 2 * V / B), "results may travel whole"


def test_parts_that_stay_whole_make_servers_uneven():
    step = StepReport(0.2, 64, 10e6, pieces=(1e6, 8e6, 1e6))
    found = expected(2, 2, 4, "dedicated", step=step)
    assert found.communicating == pytest.approx(2 * 8e6 / B)
    assert expected(2, 2, 4, "dedicated", step=StepReport(0.2, 64, 10e6)).communicating == pytest.approx(2 * 5e6 / B)
    assert loads(2, 4e6, (1e6, 1e6, 2e6)) == [2e6, 2e6], "the biggest first, wherever it is in the model"
    assert sorted(loads(3, 9e6, (1e6, 4e6, 2e6, 2e6))) == [2e6, 3e6, 4e6]


# -- computing ---------------------------------------------------------------------------------------------------------


def test_the_slowest_host_counts_and_the_best_is_what_it_is_compared_with():
    placed = place(2, 2, hosts(2))
    found = forecast(placed, STEP, Computing({"h1": {1: 0.2}, "h2": {1: 0.5}}), links(2))
    assert (found.computing, found.alone) == (0.5, 0.2)
    assert found.speedups[1] == pytest.approx(2 * 0.2 / 0.5)


def test_workers_that_share_a_host_take_as_long_as_was_measured():
    computing = Computing({"h1": {1: 0.2, 4: 0.5}, "h2": {2: 0.3}})
    assert [computing.seconds("h1", count) for count in (1, 2, 4, 8)] == [0.2, pytest.approx(0.3), 0.5, 0.5]
    assert computing.seconds("h2", 1) == 0.3
    assert computing.seconds("unknown", 4) == 0.5
    assert computing.alone == (0.2, "h1")


def on_one_host(computing: Computing) -> Outlook:
    return Outlook(2, lambda count: place(count, count, hosts(1)), STEP, computing, Links())


def test_one_worker_alone_is_never_slower_than_beside_others():
    """Seen: 3512 ms alone, 77 ms beside another one, so an efficiency of 4549 %."""
    disturbed = Computing({"h1": {1: 3.512, 2: 0.077}})
    assert disturbed.alone == (0.077, "h1") and disturbed.doubts == {"h1": (3.512, 2, 0.077)}
    assert not Computing({"h1": {1: 0.078, 2: 0.077}}).doubts, "as far as measurements differ anyway"
    (_, rows), *_ = tables(on_one_host(disturbed))
    assert rows[2][-2:] == ["2.0", "100 %"]
    text = said(on_one_host(disturbed))
    assert "a worker alone on h1 took 3512 ms per step, but only 77.0 ms as one of 2" in text


def test_uneven_measurements_are_reported():
    even, uneven = (said(on_one_host(Computing({"h1": {1: 0.2}}, spread))) for spread in (0.2, 0.8))
    assert "Not reliable: step times vary" in uneven and "80 %" in uneven and "Not reliable" not in even


@pytest.mark.parametrize("speedup", [1.0, 1.1, 2.5])
def test_the_batch_that_gives_a_speedup(speedup):
    """A step of that batch, computing as much longer, has that speed-up with nothing hidden."""

    def five(step: StepReport, compute: float) -> Forecast:
        return forecast(place(5, 5, hosts(5)), step, Computing({"h1": {1: compute}}), links(5))

    batch = five(STEP, 0.01).batch(speedup)
    assert five(StepReport(0.2, batch, V), 0.01 * batch / 64).speedups[0] == pytest.approx(speedup)
    assert Forecast(2, 2, 64, 0.9, 0.1, 0.1, 0.4).batch(1.0) == math.inf, "a slow worker is no help at any batch"


def test_which_numbers_of_workers_have_a_row():
    assert counts(1) == [1] and counts(5) == [1, 2, 3, 4, 5]
    assert counts(16) == [1, 2, 4, 8, 16] and counts(20) == [1, 2, 4, 8, 16, 20]


# -- the program's line ------------------------------------------------------------------------------------------------

LEAST = {"seconds_per_step": 0.25, "samples_per_step": 64, "model_bytes": 1000}


def parsed(**more: object) -> StepReport | None:
    """What is made of a program's line with these and the least facts."""
    return step_of(f"DMLTRAIN_MEASURE {json.dumps({**LEAST, **more})}")


def test_the_line_of_a_program_is_parsed():
    assert parsed() == StepReport(0.25, 64, 1000) and parsed(spread=0.3).spread == 0.3
    same = {"kv_store": "dist_async", "gc_type": "int8", "network": "mlp", "backend": "torch", "summed_in_host": True}
    same |= {"distributed": True, "synchronous": False}
    found = parsed(devices=2, pieces=[600, 400], compression={"none": [1, 1], "int8": [0.25, 1]}, **same)
    compression = {"none": (1.0, 1.0), "int8": (0.25, 1.0)}
    assert found == StepReport(0.25, 64, 1000, pieces=(600, 400), compression=compression, **same)


NONSENSE = ("{}", "[]", "7", "null", "{", "", '{"seconds_per_step": 1, "samples_per_step": 1}')
OTHERS = ("Epoch[0] Train-accuracy=0.5", f"DMLTRAIN_MEASURED {json.dumps(LEAST)}")


@pytest.mark.parametrize("line", [*(f"DMLTRAIN_MEASURE {each}" for each in NONSENSE), *OTHERS])
def test_nonsense_and_other_lines_are_no_step(line):
    assert step_of(line) is None


@pytest.mark.parametrize(
    "wrong",
    [
        *({"seconds_per_step": each} for each in (math.nan, -1, 0, "x")),
        *({"pieces": 3}, {"spread": -1}, {"local_steps": 0}),
        *({"compression": each} for each in (3, {}, {"none": [1, 1], "x": [1]}, {"none": [1, 1], "x": [0, 1]})),
    ],
)
def test_a_wrong_value_is_no_step(wrong):
    assert parsed() and parsed(**wrong) is None


# -- what is said ------------------------------------------------------------------------------------------------------


def outlook(workers: int, compute: float, step: StepReport = STEP, **slow: float) -> Outlook:
    computing = Computing({host.name: {1: slow.get(host.name, compute)} for host in hosts(workers)})
    return Outlook(workers, lambda count: place(count, count, hosts(workers)), step, computing, links(workers))


def said(outlook: Outlook) -> str:
    return "\n".join(sentences(outlook))


def test_distributing_pays():
    text = said(outlook(5, 1.0))
    assert "Distributing pays: 5 workers are 3.8 - 5.0 times" in text
    assert "without overlap, communication takes 24 % of a step" in text
    assert "a batch of 6 per worker breaks even" in text  # 64 * 0.32 s / (5 - 1) s, rounded up
    assert "This forecast gives bounds" in text


def test_distributing_does_not_pay_and_what_would_help():
    text = said(outlook(5, 0.05))  # one worker: 50 ms; five: 320 ms of communication
    assert "Distributing does not pay: 5 workers are 0.68 - 0.78 times" in text
    ways = "--gc-type bf16 (1.2 - 1.6), or --gc-type int8 (1.9 - 3.1), or --gc-type 2bit (3.5 - 5.0), "
    assert f"It would pay with {ways}or a batch of 116 or more per worker." in text
    assert "a batch of 103 per worker breaks even" in text
    text = said(outlook(5, 0.08))
    assert "Distributing pays only if communication overlaps with computing: 5 workers are 1.0 - 1.2" in text


def test_a_slow_host_limits_the_speed_up_and_fewer_workers_may_be_better():
    text = said(outlook(2, 0.1, h2=0.3))
    assert "Distributing does not pay: 2 workers are 0.4" in text
    assert "Neither compression nor a larger batch would help" in text
    assert "300 ms on the slowest host, as placed" in text
    computing = Computing({"h1": {1: 0.5}, "h2": {1: 0.5}, "h3": {1: 3.0}})
    text = said(Outlook(3, lambda count: place(count, count, hosts(count)), STEP, computing, links(3)))
    assert "It would pay with 2 workers (1.4 - 2.0)." in text


def test_asynchronous_and_local_kvstores_get_a_remark():
    step = StepReport(0.2, 64, V, kv_store="dist_async", synchronous=False)
    assert "--kv-store dist_async does not wait for all workers at each step" in said(outlook(2, 1.0, step))
    assert "shares nothing" in said(outlook(2, 1.0, StepReport(0.2, 64, V, kv_store="local", distributed=False)))
    assert "the savings of topk are unknown" in said(outlook(2, 1.0, StepReport(0.2, 64, V, gc_type="topk")))


def test_local_steps_share_the_bytes_of_an_exchange():
    """With compression, too."""
    often, seldom = (
        StepReport(0.2, 64, V, compression=COMPRESSION),
        StepReport(0.2, 64, V, compression=COMPRESSION, local_steps=50),
    )
    for gc_type in ("none", "2bit"):
        each, shared = (outlook(2, 1.0, step).of(2, gc_type) for step in (often, seldom))
        assert shared.communicating == pytest.approx(each.communicating / 50)
        assert shared.apart == pytest.approx(each.apart / 50) and shared.computing == each.computing
    found = parsed(model_bytes=V, kv_store="dist_local", local_steps=50)
    assert found.local_steps == 50
    assert tables(outlook(2, 1.0, found))[0][0].startswith("Forecast for dist_local, 50 local steps: batch 64 per")


def test_unknown_links_are_reported():
    blind = Outlook(2, lambda count: place(count, count, hosts(2)), STEP, Computing({"h1": {1: 1.0}}), Links())
    assert tables(blind) == [] and "the throughput between the job's hosts is unknown" in said(blind)


def test_the_tables():
    (title, rows), (_, compared) = tables(outlook(3, 0.1))
    assert "resnet-50, batch 64 per worker, --gc-type none" in title
    assert rows[1] == ["1", "0", "100", "0", "100", "640", "1.0", "100 %"]
    # V/B is 200 ms: 2 of 3 thirds there and back; 100 ms of computing before it, or behind it
    assert rows[3] == ["3", "3", "100", "267", "367 - 267", "524 - 720", "0.82 - 1.1", "27 % - 38 %"]
    assert compared[0] == ["workers", "none", "bf16", "int8", "2bit"]
    assert compared[3] == ["3", "0.82 - 1.1", "1.3 - 2.3", "1.8 - 3.0", "2.5 - 3.0"]


def test_one_host_needs_no_second_table():
    one = on_one_host(Computing({"h1": {1: 0.2, 2: 0.3}}))
    assert len(tables(one)) == 1
    assert "All traffic stays on one host" in said(one) and "Distributing pays: 2 workers are 1.3 times" in said(one)
