"""The one source of randomness of data and first weights: 64-bit words that depend on (seed, epoch, purpose) and on
nothing else.

Only numpy's raw bit generator is used, because its output is guaranteed to stay the same across numpy versions, and
the distributions of `numpy.random.Generator` are not (NEP 19): hosts with different numpy must still agree on every
epoch's permutation, or samples would be lost and repeated.
"""

import numpy as np

from dmltrain.arrays import Array
from dmltrain.errors import UserError

# One number for each purpose, so that two purposes never share words.
ORDER, AUGMENTATION, DIGITS_SPLIT, SYNTHETIC, WEIGHTS = range(5)


def words(count: int, seed: int, epoch: int, purpose: int) -> Array:
    """`count` random words, uint64 (count,). A longer stream begins with the shorter one. UserError: seed below 0."""
    return generator(seed, epoch, purpose).random_raw(count)


def generator(seed: int, epoch: int, purpose: int) -> np.random.Philox:
    """Where `words` come from, for those who want them piece by piece. UserError: seed below 0."""
    if seed < 0:
        raise UserError(f"the seed is {seed}: expected 0 or more")
    return np.random.Philox(np.random.SeedSequence([seed, epoch, purpose]))
