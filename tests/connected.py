"""`connect`, as `dmltrain.distribute` and the trainer call it, on a store of the test's own."""

from dataclasses import astuple

from dmltrain.backends.torch.distributed import connect
from dmltrain.kvstore.choices import ExchangeChoices


def connected(model, optimizer, store, averaging=None, **choices):
    """`choices`: fields of ExchangeChoices; `averaging`, a LocalSteps, stands for the three of local steps."""
    steps = zip(("local_steps", "outer_lr", "outer_momentum"), astuple(averaging) if averaging else (), strict=False)
    return connect(model, optimizer, store, ExchangeChoices(store.type, **dict(steps), **choices))
