"""Stage "codecs": compression of a step's gradients of ResNet-50 by one core and by the GPU, which must give the same
bits, and copies that it makes smaller."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from dmltrain.backends.torch.gpu.codecs import SliceEncoder, encode
from dmltrain.kvstore import codec
from dmltrain.kvstore.encoded import Encoding
from gpu.running import Asked, Row, bar
from gpu.training import GPU, seconds

ELEMENTS = 25_557_032
NAMES = tuple(name for name in codec.TYPES if name != "none")


def rows(asked: Asked) -> Iterator[Row]:
    elements = 1 << 12 if asked.small else ELEMENTS
    values = np.random.default_rng(0).standard_normal(elements).astype(np.float32) * np.float32(1e-3)
    for name in NAMES:
        row, is_equal = _of(codec.make({"type": name}), values, 0.0 if asked.small else 0.3)
        yield {"codec": name, **row}
        yield bar(f"{name}: the GPU encodes as the host does", float(is_equal), 1.0)


def _of(kind: codec.Codec, values: np.ndarray, least: float) -> tuple[Row, bool]:
    """The row, and whether the GPU gives the same bytes and residual."""
    data = np.zeros(kind.nbytes(values.size), np.uint8)
    residual = np.zeros_like(values) if kind.needs_residual else None
    since = time.perf_counter()
    kind.encode(values, data, residual)
    encoded = time.perf_counter()
    kind.decode(data, np.empty_like(values))
    decoded = time.perf_counter()
    encoder = SliceEncoder(Encoding(0, values.size, kind, None, lambda _: None), torch.device(GPU))
    gradients = torch.from_numpy(values).to(GPU)
    (found,) = encode([encoder], [gradients])
    is_equal = np.array_equal(found.cpu().numpy(), data)
    if residual is not None:
        is_equal &= np.array_equal(encoder.residual.cpu().numpy().view(np.uint32), residual.view(np.uint32))
    here, there = torch.from_numpy(data).pin_memory(), torch.zeros(data.size, dtype=torch.uint8, device=GPU)
    row = {
        "encode_ms": round((encoded - since) * 1e3, 2),
        "decode_ms": round((decoded - encoded) * 1e3, 2),
        "gpu_ms": round(seconds(lambda: encode([encoder], [gradients]), least) * 1e3, 3),
        "copy_ms": round(seconds(lambda: here.copy_(there, non_blocking=True), least) * 1e3, 3),
        "MB": round(data.size / 1e6, 2),
    }
    return row, is_equal
