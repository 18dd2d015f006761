"""What the trainers of both backends do alike: seeds, samples, devices, statistics, metrics and states."""

import numpy as np
import pytest

from dmltrain import initial, kvstore
from dmltrain.backends.table import BACKENDS
from dmltrain.base.errors import UserError
from dmltrain.layers import Auxiliary, Dense, Dropout, Flatten, Network, Tanh, chain
from dmltrain.options import parse
from tests.backends.trainers import MLP, RESNET, batch

DROPOUT = Network("dropout", chain(Flatten(), Dropout(rate=0.5), Dense("d", 10)), (1, 8, 8), 10)
NARROW = Network("narrow", chain(Flatten(), Dense("one", 1), Dense("d", 10)), (1, 8, 8), 10)


@pytest.fixture(params=BACKENDS)
def backend(request):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return BACKENDS[request.param]


@pytest.fixture
def make(backend):
    def made(network=MLP, line="", state=None, kind="local"):
        settings = parse(["--backend", backend.name, "--kv-store", kind, *line.split()])
        return backend.trainer(network, settings, kvstore.create(kind, backend=backend.name), state)

    return made


def arrays(made):
    made.synchronize()
    return {name: np.array(array) for name, array in made.state()["model"].items()}


def of_devices(made):
    """Name -> that array of each device."""
    made.synchronize()
    if hasattr(made.replicas, "modules"):  # PyTorch's
        states = [module.state_dict() for module in made.replicas.modules]
        return {name: [state[name].cpu().numpy().copy() for state in states] for name in states[0]}
    return {name: [each.asnumpy() for each in array.list_data()] for name, array in made.replicas.arrays.items()}


def test_first_weights_are_those_of_the_seed(make):
    found, expected = arrays(make(line="--seed 4")), initial.first_values(MLP, 4)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], values) for name, values in expected.items())


def test_dropout_is_decided_by_every_number_of_the_seed_and_off_in_evaluation(make):
    def digest(*numbers):
        made = make(DROPOUT)
        made.seed(*numbers)
        made.train_step(*batch(DROPOUT), 16, 0.1)
        return made.digest()

    assert digest(1, 2, 3) == digest(1, 2, 3)
    assert len({digest(1, 2, 3), digest(2, 1, 3), digest(1, 2), digest(1, 2, 4)}) == 4
    made = make(DROPOUT)
    for step in (made.evaluate, lambda *given: made.train_step(*given, 16, 0.0), made.evaluate):
        losses = {number: [] for number in range(2)}
        for number, found in losses.items():
            made.seed(number)
            step(*batch(DROPOUT))
            found.append(made.take_sums().cross_entropy)
        assert (losses[0] == losses[1]) == (step == made.evaluate)


@pytest.mark.parametrize("network", [MLP, NARROW, RESNET], ids=lambda each: each.name)
def test_a_worker_without_samples_takes_part_with_a_zero_gradient(make, network):
    """Only momentum acts."""
    made = make(network, "--mom 0.5 --wd 0")
    states = [arrays(made)]
    for count in (16, 0):
        made.train_step(*batch(network, count), 16, 0.1)
        states.append(arrays(made))
    before, first, second = states
    for each in network.parameters():
        moved = first[each.name] - before[each.name]
        np.testing.assert_allclose(second[each.name] - first[each.name], moved / 2, atol=1e-6)
    assert all(np.array_equal(first[each.name], second[each.name]) for each in network.auxiliary())
    assert made.take_sums().samples == 16


@pytest.mark.parametrize("count, kind", [(2, "local"), (3, "device")])
def test_several_devices_make_the_same_step_as_one(make, count, kind):
    several, one = make(line=f"--devices cpu:{count}", kind=kind), make()
    for step, size in enumerate([16, 15, 7, 2, 1]):  # shares are unequal, the last ones empty
        for each in (several, one):
            each.train_step(*batch(count=size, seed=step), size, 0.05)
    for name, expected in arrays(one).items():
        np.testing.assert_allclose(arrays(several)[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
    for name, (first, *others) in of_devices(several).items():
        assert len(others) == count - 1 and all(np.array_equal(first, other) for other in others), name
    assert several.take_sums().values() == pytest.approx(one.take_sums().values(), rel=1e-6)


# -- metrics and statistics -------------------------------------------------------------------------------------------


def softmax(logits):
    chances = np.exp(logits - logits.max(1, keepdims=True))
    return chances / chances.sum(1, keepdims=True)


def sums(logits, labels, top_k):
    """Samples, right ones, those among the first `top_k`, and the cross-entropy."""
    places, losses = (-logits).argsort(1), -np.log(softmax(logits)[range(len(labels)), labels])
    right, near = places[:, 0] == labels, places[:, :top_k] == labels[:, None]
    return len(labels), right.sum(), near.sum(), losses.sum()


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_evaluation_counts_losses_and_samples(make, devices):
    made = make(line=f"--top-k 3 --devices {devices}")
    images, labels = batch(count=31)
    w, logits = arrays(made), images.reshape(31, -1).astype(np.float64)
    for name in ("fc1", "fc2", "fc3"):
        logits = np.maximum(logits, 0) if name != "fc1" else logits
        logits = logits @ w[f"{name}_weight"].T + w[f"{name}_bias"]
    for part in (slice(0, 16), slice(16, 31)):
        made.evaluate(images[part], labels[part])
    assert made.take_sums().values() == pytest.approx(sums(logits, labels, 3), rel=1e-5)
    assert made.take_sums().values() == (0, 0, 0, 0)


def test_evaluation_and_a_merge_without_samples_change_nothing(make):
    made = make(RESNET, "--devices cpu:2")
    before = made.digest()
    made.evaluate(*batch(RESNET))
    assert made.digest() == before
    made.merge_statistics(lambda name, own: own, 1)
    assert made.digest() == before


def test_statistics_are_merged_over_devices_and_workers_by_samples(make):
    made = make(RESNET, "--devices cpu:2")
    made.train_step(*batch(RESNET, 5), 5, 0.05)  # 3 samples on the first device, 2 on the second
    names = {each.name for each in RESNET.auxiliary()}
    before = {name: of_device for name, of_device in of_devices(made).items() if name in names}
    assert len(before) > 6 and not any(np.array_equal(*each) for each in before.values())
    made.merge_statistics(lambda name, own: own + 15.0, 2)  # another worker has seen 15 samples, and only ones
    after = of_devices(made)
    for name, (first, second) in before.items():
        for each in after[name]:
            np.testing.assert_allclose(each, (3.0 * first + 2.0 * second + 15) / 20, rtol=1e-5)


def test_statistics_count_the_samples_since_they_were_merged_last(make):
    made, given = make(RESNET), []

    def all_reduce(name, mine):
        given.append(mine[-1])
        return mine

    for counts in ((6, 4), (), (3,)):
        for count in counts:
            made.train_step(*batch(RESNET, count), count, 0.05)
        made.merge_statistics(all_reduce, num_workers=2)
        made.evaluate(*batch(RESNET))
    assert given == [10.0, 0.0, 3.0]


@pytest.mark.parametrize("network, workers", [(RESNET, 1), (MLP, 2)])
def test_a_single_device_or_a_network_without_statistics_merges_nothing(make, network, workers):
    made = make(network)
    made.train_step(*batch(network), 16, 0.05)
    before = made.digest()
    made.merge_statistics(lambda name, own: pytest.fail("there is nothing to merge"), workers)
    assert made.digest() == before


# -- states -----------------------------------------------------------------------------------------------------------


LINES = ("", "--optimizer adam", "--devices cpu:2 --optimizer nag")


@pytest.mark.parametrize(
    "backend, line",
    [(name, line) for name in BACKENDS for line in LINES] + [("torch", "--dtype float16")],
    indirect=["backend"],
)
def test_a_saved_state_continues_bit_for_bit(backend, make, line):
    whole = make(RESNET, line)
    whole.train_step(*batch(RESNET), 16, 0.05)
    whole.merge_statistics(lambda name, mine: mine, 1)
    content = backend.encode({"epoch": 1, "state": whole.state(), "list": [1, 2.5, None, "text"]})
    found = backend.decode(content)
    assert (found["epoch"], found["list"]) == (1, [1, 2.5, None, "text"])
    resumed = make(RESNET, line, found["state"])
    for each in (whole, resumed):
        each.train_step(*batch(RESNET, seed=1), 16, 0.05)
    assert resumed.digest() == whole.digest()


def test_common_arrays_are_written_on_every_device(make):
    made = make(line="--devices cpu:2")
    for common_array in made.common_arrays():
        common_array.write(np.full_like(common_array.read(), 3.0))
    assert all((array == 3.0).all() for arrays in of_devices(made).values() for array in arrays)


def test_states_of_another_network_or_optimizer_place_are_refused(make):
    state = make().state({})
    with pytest.raises(UserError, match="another network"):
        make(RESNET, state=state)
    with pytest.raises(UserError, match="optimizer on the servers"):
        make(state={**state, "optimizer": {"servers": []}})


# -- auxiliary outputs: what the loss counts, what metrics and evaluation see ------------------------------------------

CLASSES, RATE, PLAIN = 3, 0.5, "--mom 0 --wd 0"


def classifier(name, weight):
    return Auxiliary(name, Dense(f"{name}_fc", CLASSES), weight)


def auxiliary(first=0.5, second=0.25):
    body = (Flatten(), Dense("stem", 8), classifier("first", first), Tanh(), classifier("second", second))
    return Network("n", chain(*body, Dense("fc", CLASSES)), (1, 4, 4), CLASSES)


def eight(count=8):
    return batch(auxiliary(), count)


def gradients(w, images, labels, counts):
    """By hand: the gradient of the mean of main + sum of count * auxiliary cross-entropies."""
    x = images.reshape(len(images), -1).astype(np.float64)
    stem = x @ w["stem_weight"].T + w["stem_bias"]
    inner, right = np.tanh(stem), np.eye(CLASSES)[labels]
    found, reaches = {}, {"stem": 0.0, "inner": 0.0}
    for name, where, count in (("first_fc", "stem", counts[0]), ("second_fc", "inner", counts[1]), ("fc", "inner", 1)):
        values = stem if where == "stem" else inner
        error = count * (softmax(values @ w[f"{name}_weight"].T + w[f"{name}_bias"]) - right) / len(images)
        found |= {f"{name}_weight": error.T @ values, f"{name}_bias": error.sum(0)}
        reaches[where] = reaches[where] + error @ w[f"{name}_weight"]
    error = reaches["stem"] + reaches["inner"] * (1 - inner**2)
    return found | {"stem_weight": error.T @ x, "stem_bias": error.sum(0)}


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_a_step_follows_the_main_and_the_weighted_auxiliary_losses(make, devices):
    trainer = make(auxiliary(), f"{PLAIN} --devices {devices}")
    before = arrays(trainer)
    assert set(before) == {parameter.name for parameter in auxiliary().parameters()}, "checkpoints hold the classifiers"
    trainer.train_step(*eight(), total=8, learning_rate=RATE)
    after = arrays(trainer)
    for name, gradient in gradients(before, *eight(), (0.5, 0.25)).items():
        np.testing.assert_allclose(after[name], before[name] - RATE * gradient, rtol=1e-4, atol=1e-5, err_msg=name)
    trainer.train_step(*eight(0), total=8, learning_rate=RATE)  # a worker without samples takes part
    assert all(np.array_equal(array, after[name]) for name, array in arrays(trainer).items())


def test_metrics_are_of_the_main_output(make):
    """In training as in evaluation: with learning rate 0 both see the same."""
    trainer = make(auxiliary(), "--top-k 2")
    images, labels = eight()
    w = arrays(trainer)
    inner = np.tanh(images.reshape(8, -1) @ w["stem_weight"].T + w["stem_bias"])
    expected = sums(inner @ w["fc_weight"].T + w["fc_bias"], labels, 2)
    trainer.train_step(images, labels, total=8, learning_rate=0.0)
    assert trainer.take_sums().values() == pytest.approx(expected, rel=1e-5)
    trainer.evaluate(images, labels)
    assert trainer.take_sums().values() == pytest.approx(expected, rel=1e-5)


def test_a_weight_of_zero_leaves_a_classifier_as_it_was(make):
    trainer = make(auxiliary(first=0.0), PLAIN)
    before = arrays(trainer)
    trainer.train_step(*eight(), total=8, learning_rate=RATE)
    after = arrays(trainer)
    assert np.array_equal(before["first_fc_weight"], after["first_fc_weight"])
    assert not np.array_equal(before["second_fc_weight"], after["second_fc_weight"])
