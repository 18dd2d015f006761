"""The weights of a network in MXNet's files: PREFIX-0001.params of save_checkpoint, or gluon's export.

A file names learned arrays "arg:NAME" and batch-norm statistics "aux:NAME". It also has gammas of `fixed_scale` batch
norms. MXNet does not use their values, but computes with ones (`fix_gamma`), so they are ignored here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dmltrain.base import bounded
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.layers import BatchNorm, Network, Parameter
from dmltrain.mxnet_files import params

SUFFIX = ".params"
KINDS = ("arg:", "aux:")
NO_OTHER_NAMES: Mapping[str, str] = {}
NAMED = 4  # arrays at most in a message, of each kind of difference


def read(source: Path, content: bytes | None = None) -> dict[str, Array]:
    """The arrays of a file by name, without "arg:" and "aux:"; `content` replaces that of the file. Raises UserError
    for other files."""
    try:
        return _without_kinds(params.read(bounded.read(source) if content is None else content))
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(
            f"cannot read the weights in {source}: {reason}; expected a file from MXNet's save_checkpoint, with names "
            "such as arg:NAME and aux:NAME"
        ) from error


def _without_kinds(arrays: Mapping[str, Array]) -> dict[str, Array]:
    by_name: dict[str, Array] = {}
    for name, array in arrays.items():
        short = name[4:] if name.startswith(KINDS) else name
        if short in by_name:
            raise ValueError(f"it has two arrays of the name {short[:100]}")
        by_name[short] = array
    return by_name


def renamed(arrays: Mapping[str, Array], names: Mapping[str, str]) -> dict[str, Array]:
    """The arrays by the network's own names. `names`: own name -> the file's; others stay as they are."""
    own = {other: name for name, other in names.items()}
    return {own.get(name, name): array for name, array in arrays.items()}


def fixed_gammas(network: Network) -> list[Parameter]:
    """The constant arrays of ones that MXNet has in addition to the network's arrays."""
    norms = [call for call in network.layer_calls if isinstance(call.layer, BatchNorm) and call.layer.fixed_scale]
    return [Parameter(f"{call.layer.name}_gamma", call.input_shape[:1], "gamma") for call in norms]


def fitting(
    source: Path, arrays: Mapping[str, Array], network: Network, names: Mapping[str, str] = NO_OTHER_NAMES
) -> dict[str, Array]:
    """The network's arrays (float32) of those in the file `source`. `names`: own name -> the file's, where this may be
    another one. Raises UserError if they do not fit."""
    arrays = renamed(arrays, names)
    own = {parameter.name: parameter.shape for parameter in (*network.parameters(), *network.auxiliary())}
    fixed = {fixed_gamma.name for fixed_gamma in fixed_gammas(network)}
    differences = [
        _listed("missing", [name for name in own if name not in arrays]),
        _listed(
            "of another shape",
            [
                f"{name} (expected {_text(shape)}, found {_text(arrays[name].shape)})"
                for name, shape in own.items()
                if name in arrays and arrays[name].shape != shape
            ],
        ),
        _listed("not of this network", [name[:100] for name in arrays if name not in own and name not in fixed]),
    ]
    if any(differences):
        graph = source.with_name(f"{source.name.rpartition('-')[0]}-symbol.json")
        raise UserError(
            f"the weights in {source} belong to another network than {network.name}: "
            f"{'; '.join(filter(None, differences))}. Choose --network, --num-layers, --image-shape and the data set "
            f"as they were, or take the network from the checkpoint's own graph: --network {graph}"
        )
    return {name: arrays[name].astype(np.float32, copy=False) for name in own}


def _listed(problem: str, names: list[str]) -> str:
    """'3 arrays are missing: a, b, c'; '' without names."""
    if not names:
        return ""
    count = "1 array is" if len(names) == 1 else f"{len(names)} arrays are"
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{count} {problem}: {', '.join(names[:NAMED])}{more}"


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"
