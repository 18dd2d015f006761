"""The settings of the exchange of gradients, as the kvstore and `distribute` take them."""

from __future__ import annotations

from typing import Any

from dmltrain.backends.backend import Settings, batches_of_a_step, samples_of_a_step
from dmltrain.kvstore import codec
from dmltrain.kvstore.base import KVStore


def compression(settings: Settings, store: KVStore) -> dict[str, Any]:
    """The parameters of gradient compression. Gradients are means over samples_of_a_step, so --gc-threshold is divided,
    too; in an elastic job by the workers at its start, so that it stays when members change."""
    parameter = next((row.parameter for row in codec.TABLE if row.name == settings.gc_type), None)
    value = getattr(settings, f"gc_{parameter.name}", None) if parameter else None
    if parameter is None or value is None:
        return {"type": settings.gc_type}
    divisor = samples_of_a_step(settings, store) if parameter.of_gradients else 1
    return {"type": settings.gc_type, parameter.name: value / divisor}


def factor_rows(settings: Settings, store: KVStore) -> int:
    """The number of samples of a worker's step if dense layers may send factors, else 0."""
    return 0 if settings.factors == "off" else settings.batch_size * batches_of_a_step(settings, store.num_workers)
