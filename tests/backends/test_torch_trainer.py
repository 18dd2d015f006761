"""The torch trainer's parts that other tests pass through: seeds, compression, statistics, residuals, loss scale."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dmltrain import kvstore, models  # noqa: E402
from dmltrain.backends.torch import exchange  # noqa: E402
from dmltrain.backends.torch import state as torch_state  # noqa: E402
from dmltrain.backends.torch import trainer as backend  # noqa: E402
from dmltrain.backends.torch.loss_scale import FIRST, LossScale  # noqa: E402
from dmltrain.errors import UserError  # noqa: E402
from dmltrain.kvstore.local import LocalKVStore  # noqa: E402
from dmltrain.layers import Dense, Dropout, Flatten, Network, chain  # noqa: E402
from dmltrain.options import parse  # noqa: E402
from tests.backends.served_store import ServedStore  # noqa: E402

MLP = models.create("mlp", None, 10, (1, 8, 8))
RESNET = models.create("resnet", 8, 10, (3, 16, 16))  # with batch norm
DROPOUT = Network("dropout", chain(Flatten(), Dropout(rate=0.5), Dense("d", 10)), (1, 8, 8), 10)


def make(network=MLP, line="", store=None, state=None):
    return backend.TorchTrainer(network, parse(line.split()), store or kvstore.create("local"), state)


def batch(network=MLP, count=16, seed=0):
    draw = np.random.default_rng(seed)
    return draw.standard_normal((count, *network.input_shape), dtype=np.float32), draw.integers(0, 10, count)


def test_dropout_is_decided_by_the_seed_and_by_every_number_of_it():
    def digest(*numbers):
        made = make(DROPOUT)
        made.seed(*numbers)
        made.train_step(*batch(DROPOUT), 16, 0.1)
        return made.digest()

    assert digest(1, 2, 3) == digest(1, 2, 3)
    assert len({digest(1, 2, 3), digest(2, 1, 3), digest(1, 2), digest(1, 2, 4)}) == 4


def test_dropout_is_off_in_evaluation_and_on_again_in_training():
    made = make(DROPOUT)
    images, labels = batch(DROPOUT)
    sums = []
    for number in range(2):
        made.seed(number)
        made.evaluate(images, labels)
        sums.append(made.take_sums().cross_entropy)
    assert sums[0] == sums[1]
    losses = []
    for number in range(2):
        made.seed(number)
        made.train_step(images, labels, 16, 0.0)
        losses.append(made.take_sums().cross_entropy)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("kind, samples", [("dist_sync", 20), ("dist_async", 10)])
def test_a_threshold_is_of_the_sum_over_a_steps_samples(kind, samples):
    settings = parse(f"--kv-store {kind} --gc-type 2bit --gc-threshold 0.5 --batch-size 10".split())
    assert exchange.compression(settings, ServedStore(kind)) == {"type": "2bit", "threshold": 0.5 / samples}


def test_a_codec_without_parameters_has_none():
    settings = parse(["--kv-store", "dist_sync", "--gc-type", "int8"])
    assert exchange.compression(settings, ServedStore()) == {"type": "int8"}


def test_a_ratio_is_of_no_samples():
    row = exchange.compression(
        parse(["--kv-store", "dist_sync", "--gc-type", "topk", "--batch-size", "10"]), ServedStore()
    )
    assert row["type"] == "topk"
    assert all(0 < value <= 1 for name, value in row.items() if name != "type")


def test_statistics_count_the_samples_since_they_were_merged_last():
    made, given = make(RESNET), []

    def all_reduce(name, mine):
        given.append(mine[-1])
        return mine

    for size in (6, 4):
        made.train_step(*batch(RESNET, size), size, 0.05)
    made.merge_statistics(all_reduce, num_workers=2)
    made.merge_statistics(all_reduce, num_workers=2)
    made.evaluate(*batch(RESNET))
    made.train_step(*batch(RESNET, 3), 3, 0.05)
    made.merge_statistics(all_reduce, num_workers=2)
    assert given == [10.0, 0.0, 3.0]


class Residuals(LocalKVStore):
    """Notes what it is given."""

    given = None

    def load_residuals(self, residuals):
        self.given = residuals


@pytest.mark.parametrize("name", ["residuals", "held_back"])
def test_residuals_go_into_a_checkpoint_and_back_to_the_store(name):
    """Up to version 0.4 under another name."""
    values = {"worker 0": np.arange(3, dtype=np.float32)}
    state = make().state(values)
    assert "residuals" not in make().state({}) and "residuals" not in make().state()
    state[name] = state.pop("residuals")
    state = torch_state.decode(torch_state.encode(state))
    store = Residuals("local")
    make(store=store, state=state)
    assert list(store.given) == ["worker 0"] and store.given["worker 0"].tolist() == [0, 1, 2]
    del state[name]
    store = Residuals("local")
    make(store=store, state=state)
    assert store.given is None


def test_a_state_does_not_change_with_the_network():
    made = make()
    state = made.state()
    before = state["model"]["fc1_weight"].clone()
    made.train_step(*batch(), 16, 0.5)
    assert torch.equal(state["model"]["fc1_weight"], before)
    assert not torch.equal(made.state()["model"]["fc1_weight"], before)


def test_who_computes_is_described():
    made = make()
    assert made.describe() == f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    assert made.device_memory() is None
    assert made.other_files("m", 1) == {}
    assert backend.find_device("cpu") == torch.device("cpu")


def test_without_top_k_none_are_counted():
    logits = torch.tensor([[0.0, 1, 2], [2, 1, 0]])
    assert backend.count(logits, torch.tensor([2, 0]), torch.tensor(1.5), top_k=0).tolist() == [2, 2, 0, 1.5]


def test_a_weights_gradient_is_of_all_devices_once():
    """Of replicas on several devices the first has the sum, and the others begin anew."""
    several, one = make(line="--devices cpu:2 --mom 0"), make(line="--mom 0")
    for seed in range(3):
        for each in (several, one):
            each.train_step(*batch(seed=seed), 16, 0.1)
    several.synchronize()
    one.synchronize()
    for module in several._modules:
        for found, expected in zip(module.parameters(), one._modules[0].parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# -- the loss scale ---------------------------------------------------------------------------------------------------


def scaled(*gradients, **options):
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in gradients]
    groups = [{"params": [each]} for each in weights]
    optimizer = torch.optim.SGD(groups, lr=1.0, fused=True, **options)
    scale = LossScale(optimizer, torch.device("cpu"))
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = None if gradient is None else torch.full((2,), gradient)
    return weights, optimizer, scale


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_gradient_that_overflows_skips_the_step_of_all(bad):
    gradients = [FIRST / 2] * 3
    gradients[bad] = float("inf")
    weights, optimizer, scale = scaled(*gradients)
    scale.load_state([FIRST, 1998.0])
    optimizer.step()
    assert [each.tolist() for each in weights] == [[1.0, 1.0]] * 3
    assert scale.state() == [FIRST / 2, 0.0], "good steps are counted from there"


def test_gradients_are_divided_by_the_scale_they_were_made_with():
    weights, optimizer, scale = scaled(4.0, None, momentum=0.0)
    scale.load_state([8.0, 1999.0])
    optimizer.step()
    assert weights[0].tolist() == [0.5, 0.5] and weights[1].tolist() == [1.0, 1.0]
    assert scale.state() == [16.0, 0.0]
    assert not any("momentum_buffer" in each for each in optimizer.state.values())


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_what_is_no_checkpoint_says_so_in_a_line():
    with pytest.raises(UserError) as raised:
        torch_state.decode(b"nothing of torch's")
    assert str(raised.value).startswith("not a checkpoint: ") and "\n" not in str(raised.value)
    assert len(str(raised.value)) < 220


def test_equal_arrays_have_equal_digests_in_any_memory_format():
    plain = torch.arange(24.0).reshape(2, 3, 2, 2)
    last = plain.to(memory_format=torch.channels_last).requires_grad_()
    assert torch_state.digest({"w": plain}) == torch_state.digest({"w": last})
    assert torch_state.digest({"w": plain}) != torch_state.digest({"v": plain})
