"""Workers that resume, and whose copies of a graph differ: they must agree; through real servers."""

import errno
import hashlib
import logging
import os

import numpy as np
import pytest

from dmltrain import initial, models
from dmltrain.base.errors import JobLost, UserError
from dmltrain.checkpoints import common_checkpoint
from dmltrain.checkpoints.seal import Examined, sealed
from dmltrain.mxnet_files import write
from dmltrain.options import parse
from dmltrain.train import common_network, resume
from dmltrain.train.plan import Plan
from tests.kvstore.whole_job import WholeJob
from tests.test_checkpoint import archive

WORKERS = 3
CONTENT = sealed(archive("weights of worker 0"))
FLIPPED = bytes([*CONTENT[:60], CONTENT[60] ^ 1, *CONTENT[61:]])
DAMAGED = {"missing": None, "empty": b"", "truncated": CONTENT[:-100], "flipped": FLIPPED}


@pytest.fixture(scope="module")
def job():
    made = WholeJob(workers=WORKERS, servers=2)
    yield made
    made.all(lambda store: store.close())
    assert made.ended() == ["", "", ""]
    made.close()


@pytest.fixture
def log():
    made = logging.Logger("test")
    made.lines = []
    made.addHandler(logging.Handler())
    made.handlers[0].emit = lambda record: made.lines.append(record.getMessage())
    return made


def place(folder, contents, name="m-0001.pt"):
    for rank, content in enumerate(contents):
        (folder / str(rank)).mkdir(exist_ok=True)
        if content is not None:
            (folder / str(rank) / name).write_bytes(content)


def read(job, folder, log, name="m-0001.pt", load=None, through=lambda store: store, ends=False):
    """What each worker reads, or the error that it reports and that, as in fit.train, `ends` the job."""

    def read_one(store):
        try:
            return common_checkpoint.read(folder / str(store.rank) / name, through(store), log, load)
        except (UserError, JobLost) as error:
            if ends and type(error) is UserError:
                store.abort(str(error))
            return error

    return job.all(read_one)


def test_workers_with_the_same_file_read_it(job, tmp_path, log):
    place(tmp_path, [CONTENT] * WORKERS)
    assert read(job, tmp_path, log) == [CONTENT] * WORKERS
    assert log.lines == []


@pytest.mark.parametrize("worker", [1, 2])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_worker_without_a_whole_file_takes_worker_0s_copy(job, tmp_path, log, damage, worker):
    contents = [CONTENT] * WORKERS
    contents[worker] = DAMAGED[damage]
    place(tmp_path, contents)
    assert read(job, tmp_path, log) == [CONTENT] * WORKERS
    to, of = sorted(log.lines, key=lambda line: line.startswith("Taking"))
    assert to == f"Sending {tmp_path}/0/m-0001.pt to worker {worker}, whose own file is missing or damaged"
    assert of.startswith("Taking worker 0's copy of the checkpoint: ") and f"{tmp_path}/{worker}" in of
    place(tmp_path, contents)  # nobody has written there
    own = tmp_path / str(worker) / "m-0001.pt"
    assert (own.read_bytes() if own.exists() else None) == DAMAGED[damage]


def test_a_copy_that_does_not_fit_into_memory_is_not_received():
    missing = Examined(b"", "", "no file")
    with pytest.raises(UserError, match=f"worker 0's checkpoint has {1 << 60} bytes, the limit is half of this host's"):
        common_checkpoint._sent(None, missing, 1 << 60, [])


def test_a_file_that_cannot_be_read_counts_as_none_and_several_workers_take_it_at_once(job, tmp_path, log):
    place(tmp_path, [CONTENT, None, FLIPPED])
    (tmp_path / "1" / "m-0001.pt").mkdir()
    assert read(job, tmp_path, log) == [CONTENT] * WORKERS
    assert any(os.strerror(errno.EISDIR) in line for line in log.lines)
    assert any("to workers 1 and 2, whose own file" in line for line in log.lines)


@pytest.mark.parametrize("worker", [1, 2])
def test_a_whole_file_that_is_another_one_is_an_error_on_all_workers(job, tmp_path, log, worker):
    contents = [CONTENT] * WORKERS
    contents[worker], contents[3 - worker] = sealed(archive("weights of worker 9")), None
    place(tmp_path, contents)
    errors = read(job, tmp_path, log)
    for rank, error in enumerate(errors):
        assert type(error) is UserError
        assert str(error).startswith(f"worker {worker} read another m-0001.pt than worker 0")
        assert f"Look at worker {worker}, and remove the wrong files" in str(error)
        first, other = (hashlib.sha256(each).hexdigest()[:12] for each in (CONTENT, contents[worker]))
        own = "" if rank == 3 - worker else f"; this worker read {tmp_path}/{rank}/m-0001.pt"
        assert f"(sha256 of worker 0's {first}..., worker {worker}'s {other}...{own})" in str(error)


@pytest.mark.parametrize(
    ("second", "third", "suspects"),
    [("a", "b", "workers 1 and 2"), ("a", "a", "worker 0"), ("a", "weights of worker 0", "worker 1")],
)
def test_whose_file_is_probably_wrong(job, tmp_path, log, second, third, suspects):
    place(tmp_path, [CONTENT, sealed(archive(second)), sealed(archive(third))])
    others = "worker 1" if suspects == "worker 1" else "workers 1 and 2"
    for error in read(job, tmp_path, log):
        assert str(error).startswith(f"{others} read another m-0001.pt than worker 0 (sha256 of ")
        assert f"Look at {suspects}, and remove" in str(error)


def test_of_two_workers_either_file_may_be_wrong(tmp_path, log):
    job = WholeJob(workers=2, servers=1)
    place(tmp_path, [CONTENT, sealed(archive("a"))])
    assert all("Look at worker 0 or worker 1, and remove" in str(error) for error in read(job, tmp_path, log))
    job.close()


def test_damage_that_only_the_program_of_a_file_finds(job, tmp_path, log):
    """MXNet's .params of an old job have no checksum: a truncated one looks like another one."""

    def load(source):
        if not source.read_bytes().endswith(b"end"):
            raise UserError(f"cannot read the weights in {source}")

    place(tmp_path, [b"weights end", b"weigh", b"weights end"], "m-0001.params")
    assert read(job, tmp_path, log, "m-0001.params", load) == [b"weights end"] * WORKERS
    assert any("cannot read the weights in" in line for line in log.lines)
    job = WholeJob(workers=1, servers=1)
    place(tmp_path, [b"weigh"], "m-0001.params")
    (error,) = read(job, tmp_path, log, "m-0001.params", load)
    assert str(error) == f"cannot read the weights in {tmp_path}/0/m-0001.params"
    job.close()


def test_weights_of_an_old_mxnet_job_reach_workers_whose_file_is_missing_or_damaged(job, tmp_path, log):
    network = models.create("mlp", image_shape=(1, 8, 8))
    values = initial.first_values(network, 5)
    content = write.parameters(network, values)
    place(tmp_path, [content, content[:1000], None], "m-0001.params")

    def load(store):
        prefix = tmp_path / str(store.rank) / "m"
        options = parse(["--network", "mlp", "--load-epoch", "1", "--model-prefix", str(prefix)])
        return resume.load(prefix.with_name("m-0001.params"), options, network, store, log)["state"]["model"]

    for found in job.all(load):
        assert found.keys() == values.keys() and all(np.array_equal(found[name], values[name]) for name in values)


def test_worker_0s_file_must_be_whole(tmp_path, log):
    for name, content in DAMAGED.items():
        job = WholeJob(workers=2, servers=1)
        (tmp_path / name).mkdir()
        place(tmp_path / name, [content, CONTENT])
        first, second = read(job, tmp_path / name, log, ends=True)
        assert type(first) is UserError and f"{tmp_path}/{name}/0/m-0001.pt" in str(first)
        assert type(second) is JobLost and str(first) in str(second)
        job.close()


class Careless:
    """Worker 1's store; an altered byte arrives with a broadcast."""

    def __init__(self, store):
        self._store, self.is_alone = store, False
        self.rank, self.num_workers, self.all_reduce = store.rank, store.num_workers, store.all_reduce

    def broadcast(self, values, needed):
        self._store.broadcast(values, needed)
        if self.rank == 1:
            values[70] ^= 1


def test_a_copy_that_is_altered_on_its_way_is_noticed(job, tmp_path, log):
    place(tmp_path, [CONTENT, None, None])
    first, second, third = read(job, tmp_path, log, through=Careless)
    assert (first, third) == (CONTENT, CONTENT) and type(second) is JobLost
    assert "was damaged on its way to this worker" in str(second)


def chosen(job, log, *words):
    def choose(store):
        try:
            options, source = resume.choose_checkpoint(parse([*words[store.rank]]), Plan(10), store, log)
            return options.load_epoch, source and str(source)
        except UserError as error:
            return str(error)

    return job.all(choose)


def test_worker_0_chooses_the_epoch(job, tmp_path, log):
    place(tmp_path, [CONTENT] * WORKERS, "m-0002.pt")
    place(tmp_path, [None, CONTENT, None], "m-0003.pt")
    prefixes = [f"{tmp_path}/{rank}/m" for rank in range(WORKERS)]
    last = [["--model-prefix", prefix, "--load-epoch", "last"] for prefix in prefixes]
    assert chosen(job, log, *last) == [(2, f"{prefix}-0002.pt") for prefix in prefixes]
    (tmp_path / "0" / "m-0002.pt").unlink()
    assert chosen(job, log, *last) == [(None, None)] * WORKERS
    first = [["--model-prefix", prefix, "--load-epoch", "0"] for prefix in prefixes]
    assert chosen(job, log, *first) == [(0, f"{prefix}-0000.pt") for prefix in prefixes]
    assert chosen(job, log, *([],) * WORKERS) == [(None, None)] * WORKERS


def test_worker_0_chooses_between_its_own_file_and_another_programs(job, tmp_path, log):
    place(tmp_path, [b"x"] * WORKERS, "m-0000.params")
    place(tmp_path, [None, CONTENT, None], "m-0000.npz")
    words = ["--backend", "mxnet", "--load-epoch", "0", "--model-prefix"]
    each = [[*words, f"{tmp_path}/{rank}/m"] for rank in range(WORKERS)]
    assert chosen(job, log, *each) == [(0, f"{tmp_path}/{rank}/m-0000.params") for rank in range(WORKERS)]
    place(tmp_path, [CONTENT], "m-0000.npz")
    assert chosen(job, log, *each) == [(0, f"{tmp_path}/{rank}/m-0000.npz") for rank in range(WORKERS)]


def test_an_iteration_is_found_in_its_epoch_or_at_its_end(job, tmp_path, log):
    prefixes = [f"{tmp_path}/{rank}/m" for rank in range(WORKERS)]
    for number, name, epoch in (("24", "m-0002_iter_24.pt", 2), ("20", "m-0002.pt", 2), ("7", "m-0000_iter_7.pt", 0)):
        place(tmp_path, [CONTENT] * WORKERS, name)
        words = [["--model-prefix", prefix, "--load-iteration", number] for prefix in prefixes]
        assert chosen(job, log, *words) == [(epoch, f"{tmp_path}/{rank}/{name}") for rank in range(WORKERS)]
    last = [["--model-prefix", prefix, "--load-epoch", "last"] for prefix in prefixes]
    assert chosen(job, log, *last) == [(2, f"{prefix}-0002_iter_24.pt") for prefix in prefixes]
    assert "did not get worker 0's" in chosen(job, log, words[0], words[1], last[2])[0]


def test_workers_must_be_asked_for_the_same_epoch(job, tmp_path, log):
    place(tmp_path, [CONTENT] * WORKERS, "m-0002.pt")
    prefix = ["--model-prefix", f"{tmp_path}/0/m"]
    for two, three in (("last", []), ("2", ["--load-epoch", "last"]), ("2", ["--load-epoch", "1"])):
        same = [*prefix, "--load-epoch", two]
        errors = chosen(job, log, same, same, [*prefix, *three])
        assert len(set(errors)) == 1 and "worker 2 did not get worker 0's --load-epoch" in errors[0], errors


def checked(job, networks):
    def check(store):
        try:
            common_network.check_same("m-symbol.json", networks[store.rank], store)
        except UserError as error:
            return str(error)
        return ""

    return job.all(check)


def test_equal_networks_are_no_error_and_another_one_is_named_by_all(job):
    usual, other = (models.create("resnet", depth) for depth in (8, 14))
    assert checked(job, [usual] * WORKERS) == [""] * WORKERS
    (said,) = set(checked(job, [usual, usual, other]))
    assert said.startswith("--network m-symbol.json: worker 2 rebuilt another network than worker 0 from this file: ")
    assert "look at worker 2, and copy" in said
    (said,) = set(checked(job, [other, usual, usual]))
    assert "look at worker 0, and copy" in said
