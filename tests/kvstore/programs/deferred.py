"""Steps that are awaited where the next forward needs them, against steps at once: the same weights, bit for bit."""

import numpy as np

from dmltrain import kvstore, models
from dmltrain.options import parse

store = kvstore.create("dist_sync")  # servers stay in this line, and need no torch
rank = store.rank

import torch  # noqa: E402

from dmltrain.backends.torch.distributed import distribute  # noqa: E402
from dmltrain.backends.torch.trainer import TorchTrainer  # noqa: E402

STEPS = 4
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True),
    "nag": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


def at_once(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_post_hook(lambda *_: None)  # hooks see whole steps
    return optimizer


def script(kind: str, defer: bool) -> list[np.ndarray]:
    torch.manual_seed(rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 700), torch.nn.ReLU(), torch.nn.Linear(700, 600), torch.nn.ReLU(), torch.nn.Linear(600, 10)
    )  # three buckets
    inner = OPTIMIZERS[kind](model.parameters())
    optimizer = distribute(model, inner if defer else at_once(inner), store, defer=defer)
    draw = torch.Generator().manual_seed(50 + rank)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)
        optimizer.zero_grad()
        labels = torch.randint(0, 10, (16,), generator=draw)
        torch.nn.functional.cross_entropy(model(torch.randn(16, 20, generator=draw)), labels).backward()
        optimizer.step()
        assert all(bucket.stepped is defer for bucket in optimizer._buckets)
    optimizer.settle()
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def backend(line: str, deferred: bool) -> str:
    network = models.create("resnet", 8, 10, (3, 16, 16))
    made = TorchTrainer(network, parse(["--kv-store", "dist_sync", *line.split()]), store)
    if not deferred:
        at_once(made._optimizer.inner)
    draw = np.random.default_rng(rank)
    for step in range(STEPS):
        count = 0 if step == 2 and rank == 1 else 8  # a step without samples on one worker
        images = draw.standard_normal((count, *network.input_shape), dtype=np.float32)
        made.train_step(images, draw.integers(0, 10, count), 16, 0.05 / (step + 1))
    made.synchronize()
    made.merge_statistics(store.all_reduce, store.num_workers)
    return made.digest()


for kind in OPTIMIZERS:
    whole, parts = script(kind, defer=False), script(kind, defer=True)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(whole, parts, strict=True)), kind
    flat = np.concatenate([each.ravel() for each in parts]).astype(np.float64)
    assert np.array_equal(store.all_reduce("weights", flat), 2 * flat), f"{kind}: workers differ"
for kind in ("sgd", "adam"):
    digest = backend(f"--optimizer {kind}", deferred=True)
    assert digest == backend(f"--optimizer {kind}", deferred=False), kind
    print(kind, digest, flush=True)
print("all as expected")
store.close()
