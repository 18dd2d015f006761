"""Encoding and decoding into memory that was not empty before: what a codec does not write is seen."""

import numpy as np


def encode(kind, source, residual=None):
    target = np.full(kind.nbytes(source.size), 0xA5, np.uint8)
    kind.encode(source, target, residual)
    return target


def decode(kind, data, length):
    out = np.full(length, np.nan, np.float32)
    kind.decode(data, out)
    return out


def through(kind, source, residual=None):
    return decode(kind, encode(kind, source, residual), source.size)
