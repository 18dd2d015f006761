"""Prints a digest of what a framework computes on this machine, without dmltrain: `arithmetic.py torch|mxnet`.

Processors and versions of a framework differ in the last bits of their results. Where this digest is the one of the
machine that made the golden files, continued runs must give the same bits as there, else nearly the same numbers.
"""

import hashlib
import sys

import numpy as np

SIZES = (4, 128, 64, 10)
BATCH, STEPS = 25, 12


def values(*shape: int) -> np.ndarray:
    count = int(np.prod(shape))
    return ((np.arange(count) * 7919 % 2003 / 2003.0 - 0.5) / np.sqrt(shape[-1])).astype(np.float32).reshape(shape)


def torch_digest() -> str:
    import torch

    layers = [torch.nn.Linear(fan_in, fan_out) for fan_in, fan_out in zip(SIZES, SIZES[1:], strict=False)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    model.load_state_dict({name: torch.from_numpy(values(*each.shape)) for name, each in model.state_dict().items()})
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {})):
        optimizer = kind(model.parameters(), lr=0.05, fused=True, **options)
        for dtype in (torch.float32, torch.float16):
            for step in range(STEPS):
                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    logits = model(torch.from_numpy(values(BATCH, SIZES[0]) * (step + 1))).float()
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(logits, torch.arange(BATCH) % SIZES[-1]).backward()
                optimizer.step()
    return digest(parameter.detach().numpy() for parameter in model.parameters())


def mxnet_digest() -> str:
    import mxnet as mx

    model = mx.gluon.nn.HybridSequential()
    for size in SIZES[1:]:
        model.add(mx.gluon.nn.Dense(size, activation="relu" if size != SIZES[-1] else None))
    model.initialize()
    model(mx.nd.array(values(BATCH, SIZES[0])))
    model.hybridize(static_alloc=True)
    for collect_param in model.collect_params().values():
        collect_param.set_data(mx.nd.array(values(*collect_param.shape)))
    trainer = mx.gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
    for step in range(STEPS):
        with mx.autograd.record():
            logits = model(mx.nd.array(values(BATCH, SIZES[0]) * (step + 1)))
            loss = -mx.nd.log_softmax(logits).pick(mx.nd.arange(BATCH) % SIZES[-1]).sum()
        loss.backward()
        trainer.step(BATCH)
    return digest(collect_param.data().asnumpy() for collect_param in model.collect_params().values())


def digest(arrays) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


if __name__ == "__main__":
    print({"torch": torch_digest, "mxnet": mxnet_digest}[sys.argv[1]]())
