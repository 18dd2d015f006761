"""A script that asks for compression; prints a digest of its weights and the bytes that it sent, and uses the kvstore
of its process for a second model."""

import hashlib
import json

import dmltrain
from dmltrain.errors import UserError

rank = dmltrain.rank()  # servers stay in this line, and need no torch

import torch  # noqa: E402

from dmltrain.backends.torch import plain_step  # noqa: E402
from tests.kvstore.pulling import train  # noqa: E402

plain_step.postpone_compiler()  # takes a second
weights, sent = train(rank, lambda model, optimizer: dmltrain.distribute(model, optimizer, compression="int8"))


def second(*choices: str, **more: object) -> str:
    """What a second model is told."""
    model = torch.nn.Sequential(torch.nn.Linear(500, 3))
    try:
        made = dmltrain.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), *choices, **more)
    except UserError as error:
        return str(error)
    return " ".join(map(str, made.choices))


told = [
    second("dist_device_sync", compression={"type": "int8"}, transport="auto", factors=1),
    second("dist_async", compression="int8"),
    second(),
    second(compression="int8", transport="tcp"),
]
print(json.dumps({"digest": hashlib.sha256(weights.tobytes()).hexdigest(), "sent": sent, "told": told}), flush=True)
