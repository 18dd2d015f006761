"""The journal of a worker: which views its leader has written at the end."""

import logging

from dmltrain.audit import views_file
from dmltrain.audit.journal import Journal
from dmltrain.audit.views_file import Job
from dmltrain.kvstore.view import View

JOB = Job(2, 3, 100, 8, 1, "mlp", "9c1f" * 16)


def test_older_views_that_a_stopped_leader_has_put_there_do_not_stay(tmp_path):
    first = View(1, 0, ((0, 1),), (0,))
    stopped, goes_on = (Journal(logging.getLogger("test"), member, JOB, tmp_path) for member in (0, 1))
    for journal in (stopped, goes_on):
        journal.entered(first)
    goes_on.entered(first.without([0], 7))
    stopped.close(0)  # it knows of the first view only, and writes it
    assert len(views_file.read(tmp_path / "views.json").views) == 1
    goes_on.close(9)
    assert [view.members for view in views_file.read(tmp_path / "views.json").views] == [(0, 1), (1,)]
