"""The description of a script's elastic job, which all its workers must share, and the views of a replay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmltrain.audit import views_file
from dmltrain.audit.views_file import JobFacts
from dmltrain.base import env
from dmltrain.base.errors import UserError
from dmltrain.kvstore import types
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.choices import ExchangeChoices
from dmltrain.kvstore.view import View
from dmltrain.options.training import CONSTANT

if TYPE_CHECKING:
    from dmltrain.api.loader import Loader

REPLAY = "DMLTRAIN_REPLAY"


def check(is_elastic: bool) -> None:
    """Raise UserError if a plain job is asked for what only elastic jobs have."""
    for name, value in (("DMLTRAIN_AUDIT", env.audit()), (REPLAY, env.replay())):
        if value and not is_elastic:
            raise UserError(f"{name} needs a job that was started with dmltrain-launch --elastic")


def job(store: KVStore, workers: int, loader: Loader, epochs: int, model: Any, asked: ExchangeChoices) -> JobFacts:
    """See views_file.JobFacts."""
    data = f"{len(loader.dataset)} samples of {type(loader.dataset).__name__}"
    samples, kvstore = loader.shared.samples, store.kvstore_type.name
    each = 0 if asked.batch == CONSTANT else loader.shared.batch_size
    averaging = asked.averaging(store.kvstore_type)
    steps, name = averaging.steps if averaging else 0, type(model).__name__
    return JobFacts(workers, loader.seed, samples, loader.batch, epochs, name, data, each, kvstore, local_steps=steps)


def replayed(own: JobFacts) -> tuple[View, ...]:
    """The views that DMLTRAIN_REPLAY asks for. Raises UserError for those of another job, and where workers return."""
    file = env.replay()
    if not file:
        return ()
    if not types.find(own.kvstore).synchronous:
        raise UserError(f"{REPLAY} needs dist_sync or dist_local: with {own.kvstore} no two runs have the same weights")
    recorded = views_file.read(Path(file), REPLAY)
    views_file.check_same(recorded, own, f"{REPLAY} {file}")
    views_file.check_together(recorded, f"{REPLAY} {file}")
    if any(view.joined for view in recorded.views):
        raise UserError(
            f"{REPLAY} {file}: workers joined that job; a script's replay can only let workers go, because its loop "
            "cannot return"
        )
    return recorded.views
