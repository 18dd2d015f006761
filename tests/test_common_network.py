"""Workers whose copies of a graph differ are told so before they train; through real servers."""

import pytest

from dmltrain import common_network, models
from dmltrain.errors import UserError
from tests.kvstore.whole_job import WholeJob

WORKERS = 3


@pytest.fixture(scope="module")
def job():
    made = WholeJob(workers=WORKERS, servers=1)
    yield made
    made.all(lambda store: store.close())
    made.close()


def checked(job, networks):
    def check(store):
        try:
            common_network.check("m-symbol.json", networks[store.rank], store)
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
