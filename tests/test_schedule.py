"""The learning rate of each step."""

import pytest

from dmltrain.schedule import Schedule


def test_steps_by_epoch_as_mxnet():
    rate = Schedule(base=0.1, batches=5, factor=0.1, step_epochs=(2, 3))
    assert [rate(epoch, batch) for epoch, batch in [(0, 0), (1, 4)]] == [0.1, 0.1]
    assert rate(2, 0) == pytest.approx(0.01)
    assert rate(3, 0) == rate(9, 4) == pytest.approx(0.001)


def test_a_factor_of_one_or_more_means_no_steps():
    assert Schedule(base=0.1, batches=5, factor=1.5, step_epochs=(1,))(4, 0) == 0.1


@pytest.mark.parametrize("warmup, middle", [("linear", 0.5), ("power2", 0.25), ("sqrt", 0.5**0.5)])
def test_warm_up_rises_and_its_last_step_has_the_full_rate(warmup, middle):
    rate = Schedule(base=1.0, batches=10, warmup_epochs=2, warmup=warmup)
    rates = [rate(epoch, batch) for epoch in range(3) for batch in range(10)]
    assert rates[9] == pytest.approx(middle)
    assert rates == sorted(rates) and rates[0] > 0
    assert rates[18] < 1.0 and set(rates[19:]) == {1.0}
