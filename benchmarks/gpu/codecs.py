"""Stage "codecs": compression of a step's gradients of ResNet-50 by one core, and copies that it makes smaller."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from dmltrain.kvstore import codec
from gpu.running import Asked, Row
from gpu.training import GPU, seconds

ELEMENTS = 25_557_032
NAMES = tuple(name for name in codec.TYPES if name != "none")


def rows(asked: Asked) -> Iterator[Row]:
    elements = 1 << 12 if asked.small else ELEMENTS
    values = np.random.default_rng(0).standard_normal(elements).astype(np.float32) * np.float32(1e-3)
    for name in NAMES:
        yield {"codec": name, **_of(codec.make({"type": name}), values, 0.0 if asked.small else 0.3)}


def _of(kind: codec.Codec, values: np.ndarray, least: float) -> Row:
    data = np.zeros(kind.nbytes(values.size), np.uint8)
    residual = np.zeros_like(values) if kind.needs_residual else None
    since = time.perf_counter()
    kind.encode(values, data, residual)
    encoded = time.perf_counter()
    kind.decode(data, np.empty_like(values))
    here, there = torch.from_numpy(data).pin_memory(), torch.zeros(data.size, dtype=torch.uint8, device=GPU)
    return {
        "encode_ms": round((encoded - since) * 1e3, 2),
        "decode_ms": round((time.perf_counter() - encoded) * 1e3, 2),
        "copy_ms": round(seconds(lambda: here.copy_(there, non_blocking=True), least) * 1e3, 3),
        "MB": round(data.size / 1e6, 2),
    }
