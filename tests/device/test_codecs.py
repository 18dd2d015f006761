"""The codecs of a GPU (backends/torch/gpu/codecs.py) against the host's: equal bytes, residuals and values."""

import numpy as np
import pytest
import torch

from dmltrain.backends.torch.gpu import codecs
from dmltrain.kvstore import codec
from dmltrain.kvstore.encoded import Encoding
from tests.device.devices import DEVICES
from tests.kvstore.test_codec import ALL
from tests.kvstore.through_a_codec import decode as decoded
from tests.kvstore.through_a_codec import encode

GROUP = codecs.GROUP
LENGTHS = [1, 3, GROUP - 1, GROUP, 0, 2 * GROUP + 1, 70_003]  # of the slices that are encoded together


def normal(draw, scale=0.01):
    return (draw.standard_normal(sum(LENGTHS)) * scale).astype(np.float32)


def special(draw):
    values = normal(draw)
    values[draw.integers(0, len(values), 5)] = [np.nan, -np.nan, np.inf, -np.inf, 3e38]
    return values


VALUES = {
    "normal": normal,
    "any bits": lambda draw: draw.integers(0, 1 << 32, sum(LENGTHS), dtype=np.uint32).view(np.float32),
    "heavy": lambda draw: normal(draw, 1.0) ** 9,
    "special": special,
    "tiny": lambda draw: normal(draw, 1e-42),
    "huge": lambda draw: normal(draw, 1e38).clip(-3.4e38, 3.4e38),
    "equal": lambda draw: np.full(sum(LENGTHS), -0.3, np.float32),
    "few": lambda draw: (draw.integers(-2, 3, sum(LENGTHS)) * 0.01).astype(np.float32),
    "zeros": lambda draw: np.where(draw.random(sum(LENGTHS)) < 0.5, np.float32(0), np.float32(-0.0)),
    "halves": lambda draw: np.resize((np.arange(1 << 16, dtype=np.uint32) << 16) + 0x8000, sum(LENGTHS)).view(
        np.float32
    ),
}


def bits(array):
    return array.view(np.uint32)


def equal(found, expected):
    """Bit for bit, except those of NaN."""
    same = (bits(found) == bits(expected)) | (np.isnan(found) & np.isnan(expected))
    return same.all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("parameters", ALL, ids=lambda parameters: "-".join(map(str, parameters.values())))
@np.errstate(all="ignore")
def test_bytes_residuals_and_values_are_the_hosts(parameters, values, device):
    kind, source = codec.make(parameters), VALUES[values](np.random.default_rng(7)).astype(np.float32)
    ends = np.cumsum(LENGTHS)
    kept = []
    encodings = [
        Encoding(int(end - length), length, kind, None, kept.append) for length, end in zip(LENGTHS, ends, strict=True)
    ]
    encoders = [codecs.SliceEncoder(encoding, torch.device(device)) for encoding in encodings]
    assert codecs.encodes(kind) and kept == (encoders if kind.needs_residual else [])
    residuals = [np.zeros(length, np.float32) if kind.needs_residual else None for length in LENGTHS]
    for factor in (1.0, 1.0, 1 / 3):
        gradients = torch.from_numpy(source).to(device)
        found = codecs.encode(encoders, [encoder.of(gradients) for encoder in encoders])
        for part, own, encoder, residual in zip(np.split(source, ends[:-1]), found, encoders, residuals, strict=True):
            assert np.array_equal(own.cpu().numpy(), encode(kind, part, residual))
            if residual is not None:
                assert np.array_equal(bits(encoder.residual.cpu().numpy()), bits(residual))
        values = torch.full((len(source),), 7.0, device=device)
        codecs.decode(kind, [part.clone() for part in found], values.split(LENGTHS), factor)
        expected = [decoded(kind, own.cpu().numpy(), length) for own, length in zip(found, LENGTHS, strict=True)]
        assert equal(values.cpu().numpy(), np.concatenate(expected) * np.float32(factor))
        assert np.array_equal(bits(gradients.cpu().numpy()), bits(source))
        source = source[::-1].copy()


def test_each_codec_of_the_project_is_there():
    assert {type(codec.make(parameters)) for parameters in ALL} == set(codecs.TABLE)
