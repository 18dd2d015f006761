"""The first values of arrays, described as values; dmltrain/initial computes the numbers.

`INITIALISERS` has those of MXNet's common/fit.py by their names there, with the defaults of MXNet's classes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Initialiser:
    """Base of all initialisers."""


@dataclass(frozen=True)
class Constant(Initialiser):
    """The same number everywhere."""

    value: float = 0.0


@dataclass(frozen=True)
class Exactly(Initialiser):
    """These numbers, one for each element of a flat array."""

    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Normal(Initialiser):
    """Normal of mean 0 (mx.init.Normal; Caffe's filler "gaussian")."""

    sigma: float = 0.01


@dataclass(frozen=True)
class Uniform(Initialiser):
    """Uniform in -scale..scale (mx.init.Uniform)."""

    scale: float = 0.07


@dataclass(frozen=True)
class Xavier(Initialiser):
    """Of variance `magnitude` / n ("gaussian"), or uniform between plus and minus the root of this (mx.init.Xavier).

    `factor_type` says what n is: "in", the values that an output is computed from; "out", the outputs that an input
    takes part in; "avg", their mean. So the uniform kind of "in" and magnitude 3 is Caffe's filler "xavier", that of
    "avg" Keras' glorot_uniform, and the gaussian kind of "in" and magnitude 2 Keras' he_normal (which Keras 2
    truncates).
    """

    rnd_type: str = "uniform"
    factor_type: str = "avg"
    magnitude: float = 3

    def __post_init__(self) -> None:
        if self.rnd_type not in ("gaussian", "uniform") or self.factor_type not in ("in", "out", "avg"):
            raise ValueError(f"{self}: rnd_type must be gaussian or uniform, factor_type in, out or avg")


@dataclass(frozen=True)
class Orthogonal(Initialiser):
    """`scale` times a matrix of orthonormal rows or columns, whichever are fewer (mx.init.Orthogonal).

    The matrix is a factor of the singular value decomposition of one that is uniform in -1..1.
    """

    scale: float = 1.414


@dataclass(frozen=True)
class Dirac(Initialiser):
    """Each of the first filters passes one input channel on, as `torch.nn.init.dirac_`; the others are as `rest`.

    Filter i has a 1 in the middle of channel i, and zeros elsewhere. There are as many as channels, or as filters.
    """

    rest: Initialiser = Constant()


HE = Xavier("gaussian", "in", 2)  # MXNet's choice for image classification, after He et al. 2015
INITIALISERS: dict[str, Initialiser | None] = {
    "default": None,  # the network's own
    "xavier": Xavier(),
    "msra": Xavier("gaussian", "avg", 2 / (1 + 0.25**2)),  # mx.init.MSRAPrelu
    "orthogonal": Orthogonal(),
    "normal": Normal(),
    "uniform": Uniform(),
    "one": Constant(1.0),
    "zero": Constant(0.0),
}
