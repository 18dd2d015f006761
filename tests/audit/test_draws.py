"""Which samples any loop has drawn: DistributedSampler, loaders of Accelerate, and what goes wrong with them."""

import functools
import itertools

import accelerate
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

import dmltrain
from dmltrain.audit.cli import main
from dmltrain.audit.count_draws import count
from dmltrain.base.errors import UserError

SAMPLES, WORKERS, BATCH = 42, 4, 3


@pytest.fixture
def on_each(monkeypatch, tmp_path):
    """`on_each(run)`: run(rank) as each rank of a job, whose audit is in the folder that this returns."""
    monkeypatch.setenv("DMLTRAIN_AUDIT", str(tmp_path))

    def on_each(run, workers=WORKERS):
        monkeypatch.setenv("WORLD_SIZE", str(workers))
        for rank in range(workers):
            monkeypatch.setenv("RANK", str(rank))
            run(rank)
        return tmp_path

    return on_each


def loader_of(sampler):
    return DataLoader(torch.arange(SAMPLES), batch_size=BATCH, sampler=sampler)


def distributed(rank, **options):
    return DistributedSampler(range(SAMPLES), WORKERS, rank, **options)


def prepared(rank, seed=0, workers=WORKERS):
    """A loader as Accelerate prepares it in a process of `rank`."""
    loader = DataLoader(torch.arange(SAMPLES), batch_size=BATCH, shuffle=True)
    return dmltrain.audited(
        prepare_data_loader(
            loader, num_processes=workers, process_index=rank, use_seedable_sampler=True, data_seed=seed
        )
    )


@pytest.mark.parametrize(
    ("options", "rest"),
    [({}, "each once, but for 2 that pad the last batches"), ({"drop_last": True}, "each once; 2 left out")],
)
def test_a_distributed_sampler_draws_each_sample_once_but_for_what_makes_ranks_equal(on_each, options, rest):
    def run(rank):
        sampler, plain = dmltrain.audited(distributed(rank, **options)), distributed(rank, **options)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            plain.set_epoch(epoch)
            assert torch.cat(list(loader_of(sampler))).tolist() == list(plain)

    counted = count(on_each(run))
    used = 40 if options else 42
    assert counted.problems == () and len(counted.rows) == 2
    assert all(row.startswith(f"epoch {n}: {used} of 42 samples used, {rest}") for n, row in enumerate(counted.rows))


def test_a_loader_is_audited_in_place_also_for_who_neither_sets_the_epoch_nor_asks_for_more_than_it_has(on_each):
    def run(rank):
        loader = loader_of(distributed(rank))
        assert dmltrain.audited(loader) is loader and len(loader) == 4
        assert [len(batch) for _ in range(2) for batch in itertools.islice(loader, 4)] == [3, 3, 3, 2] * 2

    ends = "42 of 42 samples used, each once, but for 2 that pad the last batches"
    assert count(on_each(run)).rows == tuple(f"epoch {epoch}: {ends}" for epoch in range(2))


def begin(rank, stop=2, seed=0, **more):
    """The first start, which ends after `stop` batches of its second epoch."""
    loader = prepared(rank, seed, **more)
    list(loader)
    for number, _ in enumerate(loader, 1):
        if number == stop:
            return


def go_on(rank, skipped, seed=0, **more):
    """The second start, in the second epoch."""
    loader = prepared(rank, seed, **more)
    loader.set_epoch(1)
    list(accelerate.skip_first_batches(loader, skipped))


@pytest.mark.parametrize(
    ("skipped", "seed", "problem"), [(1, 0, ""), (2, 0, ""), (4, 0, "lost"), (1, 7, "repeated after a start went on")]
)
def test_a_loop_of_accelerate_that_goes_on_in_the_middle_of_an_epoch(on_each, capsys, skipped, seed, problem):
    """The first start has drawn batches that it made no checkpoint of; skipping too many loses them, and another order
    uses some twice."""

    def run(rank):
        begin(rank)
        go_on(rank, skipped, seed)

    folder = on_each(run)
    assert main([str(folder)]) == bool(problem)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"start 2 went on in epoch 1 with batch {skipped + 1}"
    assert said[1].startswith("epoch 0: 42 of 42 samples used, each once, but for 6 that pad")
    assert problem in said[2] and said[2].startswith("problem: " if problem else "epoch 1: 42 of 42 samples used")


@pytest.mark.parametrize(
    ("workers", "skipped", "problem"),
    [((4, 2), 2, ""), ((2, 4), 1, ""), ((4, 2, 4), 2, ""), ((4, 2), 0, ""), ((4, 2), 7, "lost"), ((4, 2), 3, "")],
)
def test_a_start_with_another_number_of_workers_goes_on_with_the_samples_that_are_left(
    on_each, workers, skipped, problem
):
    """The first start has drawn up to three batches of each worker, and its checkpoint is before some of them."""
    first, *others = workers
    folder = on_each(functools.partial(begin, workers=first), first)
    for count_ in others:
        batches = skipped * others[0] // count_
        on_each(functools.partial(go_on, skipped=batches, workers=count_), count_)
    counted = count(folder)
    assert [bool(counted.problems), problem in "".join(counted.problems)] == [bool(problem), True], counted
    assert len(counted.rows) == len(workers) - 1 + 2 - len(counted.problems)
    assert counted.rows[0] == f"start 2 went on in epoch 1 with batch {skipped + 1}"


def test_an_epoch_that_is_not_over_has_lost_nothing(on_each):
    assert count(on_each(begin)).rows[-1].endswith("not all workers came to its end, each once")


def test_what_cannot_be_counted_is_refused(tmp_path, capsys):
    with pytest.raises(UserError, match="list has no dataset .* samples=50000"):
        dmltrain.audited([1, 2], tmp_path)
    with pytest.raises(UserError, match="makes no batches"):
        dmltrain.audited(DataLoader(torch.arange(3), batch_size=None), tmp_path)
    assert main([str(tmp_path / "none")]) == 2 and "draws.json" in capsys.readouterr().err
    (tmp_path / "draws.json").write_text('{"format": 1, "samples": 0, "workers": 1, "drop_last": false}')
    assert main([str(tmp_path)]) == 2 and "samples is 0" in capsys.readouterr().err


def test_batch_samplers_of_ones_own_say_how_many_samples_there_are(tmp_path):
    batches = dmltrain.audited(BatchSampler(SequentialSampler(range(5)), 2, drop_last=True), tmp_path)
    assert list(batches) == [[0, 1], [2, 3]] and batches.batch_size == 2
    assert count(tmp_path).rows == ("epoch 0: 4 of 5 samples used, each once; 1 left out at its end (drop_last)",)
    assert list(dmltrain.audited([[4], [0]], tmp_path, samples=5)) == [[4], [0]]
