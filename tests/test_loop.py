"""dmltrain.State and dmltrain.loader in one process: what a script has of them alone, and what they refuse."""

import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import dmltrain  # noqa: E402
from dmltrain.api import state as states  # noqa: E402
from dmltrain.base.errors import UserError  # noqa: E402
from dmltrain.data.assignment.parts import Shared  # noqa: E402
from dmltrain.rounds.plain import PlainRounds  # noqa: E402


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("DMLC_ROLE", "MXNET_UPDATE_ON_KVSTORE", "DMLTRAIN_AUDIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # distribute replaces it
    monkeypatch.setattr(states, "_states", [])


def made(layers=None, **values):
    model = torch.nn.Sequential(*(layers or [torch.nn.Linear(1, 1)]))
    optimizer = dmltrain.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    return dmltrain.State(model=model, optimizer=optimizer, **values)


def numbers(count):
    """A data set whose samples are their own numbers."""
    return torch.arange(count, dtype=torch.float32)[:, None]


def read(loader):
    return [sorted(int(each) for each in batch.flatten()) for batch in loader]


def step(state, batch):
    state.optimizer.zero_grad()
    state.model(batch).mean().backward()
    state.optimizer.step()


# -- the loader -------------------------------------------------------------------------------------------------------


def test_each_epoch_has_each_sample_once_in_an_order_of_its_own():
    state = made()
    loader = dmltrain.loader(numbers(10), batch_size=4, seed=3)
    found = []
    for epoch in state.epochs(2):
        assert state.epoch == epoch
        batches = [batch.flatten().tolist() for batch in loader]
        assert [len(batch) for batch in batches] == [4, 4, 2] and len(loader) == 3
        found.append(sum(batches, []))
    assert [sorted(each) for each in found] == [[*range(10)]] * 2
    assert found[0] != found[1] != sorted(found[1])


def test_dropped_samples_come_in_the_next_epoch():
    state = made()
    loader = dmltrain.loader(numbers(10), batch_size=4, drop_last=True)
    batches = [batch for _ in state.epochs(5) for batch in read(loader)]
    assert [len(batch) for batch in batches] == [4] * 10
    assert sorted(sum(batches, [])) == sorted([*range(10)] * 4)


def losses_of(size, micro_batches, epochs=2, samples=22):
    """The weights after steps of `size` samples in so many micro-batches; the number of steps, and those of batches."""
    torch.manual_seed(0)
    state = made([torch.nn.Linear(1, 3), torch.nn.Linear(3, 1)])
    loader = dmltrain.loader(numbers(samples) / samples, size // micro_batches, micro_batches=micro_batches, seed=5)
    steps, sizes = 0, []
    for _ in state.epochs(epochs):
        for batch in loader:
            state.model(batch).mean().backward()
            sizes.append(len(batch))
            if loader.step_ends:
                state.optimizer.step()
                state.optimizer.zero_grad()
                steps += 1
    return torch.cat([parameter.detach().flatten() for parameter in state.model.parameters()]), steps, sizes


def test_micro_batches_make_the_steps_of_whole_ones_and_a_step_before_the_last_is_refused():
    """Also at the end of an epoch, where the last ones are smaller and fewer."""
    whole_, steps, sizes = losses_of(8, 1)
    assert (steps, sizes) == (6, [8, 8, 6] * 2)
    parts, steps, sizes = losses_of(8, 2)
    assert (steps, sizes) == (6, [4, 4, 4, 4, 4, 2] * 2)
    torch.testing.assert_close(parts, whole_)
    assert not torch.allclose(losses_of(4, 1)[0], whole_)
    state = made()
    loader = dmltrain.loader(numbers(8), 2, micro_batches=2)
    with pytest.raises(UserError, match="call it only where loader.step_ends is true"):
        for _ in state.epochs(1):
            for batch in loader:
                step(state, batch)


def test_torchs_options_count():
    state = made()
    collated = []
    loader = dmltrain.loader(numbers(6), 3, num_workers=2, collate_fn=lambda rows: torch.stack(rows) + 100)
    for _ in state.epochs(2):
        collated.append(read(loader))
    assert sorted(sum(collated[0], [])) == sorted(sum(collated[1], [])) == [*range(100, 106)]


def plain_rounds(samples, batch, workers, rank):
    shared = Shared(samples, workers, batch, samples)
    return PlainRounds(shared.part(rank, 0, 0), lambda step: sum(shared.step_sizes(step)), 0, shared.steps)


def workers_of(monkeypatch, rank, workers, samples, batch):
    """What worker `rank` of a plain job reads, the weight of each batch, and how many samples of it count."""
    state = made()
    monkeypatch.setattr(states.State, "workers_at_start", workers)
    loader = dmltrain.loader(numbers(samples), batch)
    rounds = plain_rounds(samples, batch, workers, rank)
    monkeypatch.setattr(states.State, "_plain_rounds", lambda self: rounds)
    found = []
    for _ in state.epochs(1):
        for batch_ in loader:
            weight = state.optimizer._exchange.gradients.weight
            found.append((sorted(int(each) for each in batch_.flatten()), weight, loader.count))
    return found


def test_unequal_parts_weigh_what_they_have_and_who_has_none_weighs_nothing(monkeypatch):
    found = [workers_of(monkeypatch, rank, 3, 14, 4) for rank in range(3)]
    assert [[row[1] for row in rows] for rows in found] == [[1.0, 1.5], [1.0, 1.5], [1.0, 0.0]]
    assert [[row[2] for row in rows] for rows in found] == [[4, 1], [4, 1], [4, 0]]
    counted = [number for rows in found for batch, _, count in rows if count for number in batch]
    assert sorted(counted) == [*range(14)]
    assert len(found[2][1][0]) == 4  # a batch that stands in is a whole one


def test_a_batch_that_stands_in_leaves_the_statistics_as_they_are(monkeypatch):
    state, seen = made([torch.nn.BatchNorm1d(1)]), []
    monkeypatch.setattr(states.State, "workers_at_start", 4)
    loader = dmltrain.loader(numbers(10), 2)
    monkeypatch.setattr(states.State, "_plain_rounds", lambda self: plain_rounds(10, 2, 4, 3))
    for _ in state.epochs(1):
        for batch in loader:
            step(state, batch)
            seen.append((loader.count, state.model[0].running_mean.item()))
    assert [count for count, _ in seen] == [2, 0]
    assert seen[0][1] != seen[1][1], "the body has changed them"
    assert state.model[0].running_mean.item() == seen[0][1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batch_size": 0}, "batch_size=0, expected a whole number of at least 1"),
        ({"micro_batches": 0}, "micro_batches=0, expected a whole number of at least 1"),
        ({"seed": -1}, "seed=-1, expected a whole number of at least 0"),
        ({"shuffle": True}, "shuffle is not an option, because the order of samples follows from seed and epoch"),
        ({"worker": 3}, "unexpected keyword argument 'worker'"),
        ({"num_workers": -1}, "num_workers"),
        ({"batch_size": 11, "drop_last": True}, "has 10 samples, which is less than a step of 1 workers"),
    ],
)
def test_wrong_options_are_explained(arguments, message):
    made()
    with pytest.raises(UserError) as raised:
        dmltrain.loader(numbers(10), **{"batch_size": 2, **arguments})
    assert message in str(raised.value)


def test_a_loader_needs_a_state_a_data_set_and_an_epoch():
    with pytest.raises(UserError, match="make `state = dmltrain.State"):
        dmltrain.loader(numbers(4))
    state = made()
    with pytest.raises(UserError, match="generator is no map-style data set"):
        dmltrain.loader(each for each in "abc")
    loader = dmltrain.loader(numbers(4))
    with pytest.raises(UserError, match="has a dmltrain.loader already"):
        dmltrain.loader(numbers(4))
    with pytest.raises(UserError, match="once in each turn of `for epoch in state.epochs"):
        next(iter(loader))
    for _ in state.epochs(1):
        read(loader)
        with pytest.raises(UserError, match="once in each turn"):
            next(iter(loader))


# -- the state --------------------------------------------------------------------------------------------------------


def trained(state, epochs, path=None):
    loader = dmltrain.loader(numbers(10), 4)
    for epoch in state.epochs(epochs):
        for batch in loader:
            step(state, batch)
            state.schedule.step()
        state.best = epoch / 4
        state.seen.append(epoch)
        if path:
            state.save(path)
    return state.digest()


def whole():
    state = made([torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2)], best=0.0, seen=[])
    schedule = torch.optim.lr_scheduler.MultiStepLR(state.optimizer, [2, 5, 7])
    return dmltrain.State(model=state.model, optimizer=state.optimizer, schedule=schedule, best=0.0, seen=[])


def test_a_script_that_resumes_makes_the_steps_of_one_that_did_not_stop(tmp_path):
    torch.manual_seed(0)
    expected = trained(whole(), 3)
    torch.manual_seed(0)
    trained(whole(), 2, tmp_path / "it.pt")
    state = whole()
    assert state.load(tmp_path / "none.pt") is False and state.epoch == 0
    assert state.load(tmp_path / "it.pt") is True
    assert (state.epoch, state.best, state.seen) == (2, 0.25, [0, 1])
    assert trained(state, 3) == expected
    assert state.seen == [0, 1, 2]


def altered(content):
    """The same with one bit of the weights' bytes changed."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [lambda content: b"x", lambda content: content[:-40], altered])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "it.pt"
    whole().save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="it.pt is damaged or truncated"):
        whole().load(path)


def test_a_file_of_state_save_is_one_of_torch_and_one_without_a_seal_is_read(tmp_path):
    path = tmp_path / "it"
    whole().save(path)
    torch.save(torch.load(path, weights_only=True), path)  # as an earlier version wrote it
    assert whole().load(path) is True


def test_a_file_of_another_state_is_refused(tmp_path):
    whole().save(tmp_path / "it.pt")
    with pytest.raises(UserError, match="it.pt has the names model, optimizer, schedule, this State has model, opt"):
        made(best=0.0, seen=[]).load(tmp_path / "it.pt")
    other = made()
    other.save(tmp_path / "other.pt")
    with pytest.raises(UserError, match="other.pt: model does not fit: "):
        made([torch.nn.Linear(1, 2)]).load(tmp_path / "other.pt")


def test_values_are_attributes_and_only_those_that_were_named():
    state = made(best=0.0, rows={"a": [1, None, "b", torch.ones(2)]})
    state.best = torch.ones(3).numpy().sum() / 2  # numpy's numbers become Python's
    assert state.best == 1.5 and type(state.best) is float
    with pytest.raises(AttributeError, match=r"the state has no 'worst': name it in dmltrain.State\(worst=...\)"):
        state.worst = 1
    with pytest.raises(AttributeError, match="the state has no 'worst'"):
        state.worst  # noqa: B018
    with pytest.raises(UserError, match="state.best has a set"):
        state.best = [{1, 2}]
    with pytest.raises(UserError, match="state.model keeps its state itself"):
        state.model = torch.nn.Linear(1, 1)
    with pytest.raises(UserError, match="dmltrain.State: epoch is a name of its own"):
        made(epoch=0)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UserError, match="optimizer is a SGD, expected what dmltrain.distribute returns"):
        dmltrain.State(model=model, optimizer=torch.optim.SGD(model.parameters()))


def test_what_workers_do_together_comes_after_the_loader():
    state = made()
    loader = dmltrain.loader(numbers(4), 2)
    for _ in state.epochs(1):
        with pytest.raises(UserError, match="state.all_reduce: workers can do this together only after the loop"):
            state.all_reduce(1.0)
        for _ in loader:
            with pytest.raises(UserError, match="state.repeat: workers can do this together only after the loop"):
                state.repeat(lambda: None)
        assert state.repeat(lambda: state.all_reduce([1, 2]).tolist()) == [1.0, 2.0]
        assert state.all_reduce(3) == 3.0 and state.all_reduce(torch.ones(2, 2)).shape == (2, 2)
        assert list(state.part(3)) == [0, 1, 2]


def test_an_audit_needs_an_elastic_job(monkeypatch):
    monkeypatch.setenv("DMLTRAIN_AUDIT", "there")
    with pytest.raises(UserError, match="DMLTRAIN_AUDIT needs a job that was started with dmltrain-launch --elastic"):
        made()
