"""MXNet's optimizers from a spec, for the workers' devices and the servers. A spec is JSON, never a pickled object.

For example {"name": "sgd", "lr": 0.1, "momentum": 0.9, "wd": 1e-4, "keys": {"3": {"wd_mult": 0.0}}}. The name must be
in TABLE. "lr" is the learning rate, and the other numbers have the names of MXNet's class; "keys" holds the multipliers
of single keys.

The classes are MXNet's own, except where its class has a fault that matters here, or is missing: adamw, nadam, lars,
lbsgd, dcasgd, sgld (the files in optimizers/ say why).

The PyTorch backend has the same formulas, so both backends train alike, except for adam: MXNet's w -= lr * sqrt(1 -
beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon) adds epsilon to a v without bias correction, so in the first steps it
has up to 32 times more weight than torch's. (With epsilon 1e-8 the results differ where gradients are below 1e-3.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dmltrain import optimizers
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.layers import Parameter

COMMON = ("wd", "rescale_grad", "clip_gradient", "multi_precision", "begin_num_update")
TABLE = {row.name: row.mxnet for row in optimizers.TABLE if row.mxnet}
MULTIPLIERS = ("lr_mult", "wd_mult")  # of a key
OF_KEYS = (*MULTIPLIERS, "layerwise")  # the last: whether its rate follows its norms (lars), 1 if missing
COUNT = "updates"  # the field with a key's number of updates


class Updater:
    """One optimizer for many keys on one device: `updater(key, gradient, weight)` changes `weight` (NDArray) in place.

    The call is asynchronous, as all of MXNet's operations. Raises ValueError for an invalid spec. The first update of a
    key whose loaded state has another shape raises UserError.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._optimizer = make(spec)
        self._states: dict[int, Any] = {}  # key -> the optimizer's state: None, an NDArray or nested tuples of them
        self._loaded: dict[int, dict[str, Array]] = {}  # loaded states of keys without an update since

    def __call__(self, key: int, gradient: Any, weight: Any) -> None:
        if self._optimizer.lr_mult.get(key) == 0.0:  # of a frozen array; some of MXNet's classes divide by the rate
            return
        if key not in self._states:
            self._states[key] = self._first_state(key, weight)
        self._optimizer.update_multi_precision(key, weight, gradient, self._states[key])

    def set_learning_rate(self, rate: float) -> None:
        self._optimizer.lr = rate

    def state(self) -> dict[str, Array]:
        """ "KEY/updates" (a count) and "KEY/0", "KEY/1" ... (the optimizer's arrays in its order). Waits for these."""
        arrays = {f"{key}/{name}": array for key, fields in self._loaded.items() for name, array in fields.items()}
        arrays |= {f"{key}/{COUNT}": np.array(self._counts[key]) for key in self._states}
        return arrays | {name: array.asnumpy() for name, array in self.arrays().items()}

    def arrays(self) -> dict[str, Any]:
        """The optimizer's NDArrays of all keys that had an update, by the names in `state`."""
        return {
            f"{key}/{index}": array for key, state in self._states.items() for index, array in enumerate(_flat(state))
        }

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Continue from a result of `state`. Each key loads its arrays at its next update. Raises ValueError for names
        that `state` does not produce."""
        loaded: dict[int, dict[str, Array]] = {}
        for name, array in arrays.items():
            key, _, field = name.partition("/")
            if not key.isdecimal() or not (field == COUNT or field.isdecimal()):
                raise ValueError(f"an optimizer's state has no {name!r}: expected KEY/{COUNT}, KEY/0, KEY/1 ...")
            loaded.setdefault(int(key), {})[field] = array
        self._states, self._loaded = {}, loaded
        self._counts.clear()
        self._counts.update({key: int(fields[COUNT]) for key, fields in loaded.items() if COUNT in fields})
        self._optimizer.num_update = max(self._counts.values(), default=self._optimizer.begin_num_update)

    @property
    def _counts(self) -> dict[int, int]:
        counts: dict[int, int] = self._optimizer._index_update_count  # of the current context, which never changes here
        return counts

    def _first_state(self, key: int, weight: Any) -> Any:
        fresh = self._optimizer.create_state_multi_precision(key, weight)
        loaded = self._loaded.pop(key, {})
        for index, array in enumerate(_flat(fresh) if loaded else ()):
            given = loaded.get(str(index))
            if given is None or given.shape != array.shape:
                raise UserError(
                    f"the optimizer's state of key {key} belongs to another network, another number of servers or "
                    f"other options (--mom 0): array {index} has shape {getattr(given, 'shape', None)}, expected "
                    f"{array.shape}; resume with the network, servers and options that it was saved with"
                )
            array[:] = given
        return fresh


def make(spec: Mapping[str, Any]) -> Any:
    """The mx.optimizer.Optimizer of a spec. Raises ValueError that lists what is valid."""
    numbers = dict(spec)
    name, keys = str(numbers.pop("name", "")).lower(), numbers.pop("keys", {})
    if name not in TABLE:
        raise ValueError(f"unknown optimizer {name!r}: valid are {', '.join(TABLE)}")
    allowed = (*TABLE[name].options, *COMMON)
    rate = _number("lr", numbers.pop("lr", 0.01))  # MXNet's own default
    for given, value in numbers.items():
        if given not in allowed:
            raise ValueError(f"optimizer {name} takes lr, {', '.join(allowed)} and keys; not {given!r}")
        _number(given, value)
    optimizer = _class(name)(learning_rate=rate, **numbers)
    of_keys = {key: _of_key(key, value) for key, value in keys.items()}
    optimizer.lr_mult, optimizer.wd_mult = (
        {int(key): numbers[kind] for key, numbers in of_keys.items() if kind in numbers} for kind in MULTIPLIERS
    )
    if hasattr(optimizer, "layerwise_keys"):
        optimizer.layerwise_keys = {int(key): bool(numbers.get("layerwise", True)) for key, numbers in of_keys.items()}
    return optimizer


def spec_of(optimizer: Any) -> dict[str, Any]:
    """An mx.optimizer.Optimizer as a spec, for the servers. Raises UserError unless its class is exactly one in TABLE:
    MXNet would pickle the object, and a class of the program itself fails silently on the servers."""
    name = _name_of(optimizer)
    if name is None:
        kind = type(optimizer)
        raise UserError(
            f"optimizer {kind.__module__}.{kind.__qualname__} cannot run on the servers, which have "
            f"{', '.join(TABLE)}: use one of these classes of MXNet, or run it on the workers (update_on_kvstore 0, "
            "not with dist_async)"
        )
    if optimizer.lr_scheduler is not None:
        raise UserError(
            f"optimizer {name} has an lr_scheduler, which servers do not support: leave it out, and call the kvstore's "
            "set_learning_rate before a step to change the learning rate"
        )
    row = TABLE[name]
    numbers = {given: getattr(optimizer, row.attributes.get(given, given)) for given in (*row.options, *COMMON)}
    keys = {
        str(key): _kind_numbers(name, optimizer.idx2name.get(key, ""))
        | {kind: _multiplier(optimizer, key, kind) for kind in MULTIPLIERS}
        for key in _keys(optimizer)
    }
    return {
        "name": name,
        "lr": float(optimizer.lr),
        "keys": keys,
        **{given: value for given, value in numbers.items() if value is not None},
    }


def key_numbers(name: str, parameters: Mapping[int, Parameter]) -> dict[str, dict[str, float]]:
    """A spec's "keys" for the optimizer `name` from the network's arrays by key: multipliers other than 1."""
    numbers_of = {}
    for key, parameter in parameters.items():
        multipliers = {kind: getattr(parameter, kind) for kind in MULTIPLIERS if getattr(parameter, kind) != 1.0}
        numbers_of[str(key)] = {**multipliers, **TABLE[name].of_kind(parameter.kind)}
    return {key: numbers for key, numbers in numbers_of.items() if numbers}


def is_elementwise(spec: Mapping[str, Any]) -> bool:
    """Whether a server may step a part of a key."""
    return TABLE[str(spec["name"]).lower()].elementwise


def _name_of(optimizer: Any) -> str | None:
    """The name of an object's class in TABLE. One of MXNet's own counts if the class of ours that replaces it has the
    same options."""
    names = {_class(name): name for name in TABLE}
    for name, row in TABLE.items():
        if row.own and all(hasattr(optimizer, row.attributes.get(given, given)) for given in row.options):
            names.setdefault(getattr(mxnet_compat.load().optimizer, row.name, type(None)), name)
    return names.get(type(optimizer))


def _kind_numbers(name: str, array: str) -> dict[str, float]:
    """What an optimizer gives an array by its kind, the last part of the array's name; without multipliers."""
    numbers = TABLE[name].of_kind(array.rpartition("_")[2] or "weight")
    return {given: number for given, number in numbers.items() if given not in MULTIPLIERS}


def _keys(optimizer: Any) -> list[int]:
    """The keys in the optimizer's tables: gluon's parameters, Module's names, or multipliers by number."""
    known = {*optimizer.param_dict, *optimizer.idx2name, *optimizer.lr_mult, *optimizer.wd_mult}
    return sorted(key for key in known if isinstance(key, int))


def _multiplier(optimizer: Any, key: int, kind: str) -> float:
    """In MXNet's order of precedence (Optimizer._get_lrs, _get_wds)."""
    if key in optimizer.param_dict:
        return float(getattr(optimizer.param_dict[key], kind))
    given = getattr(optimizer, kind)
    return float(given.get(key, given.get(optimizer.idx2name.get(key), 1.0)))


def _of_key(key: str, values: Any) -> dict[str, float]:
    if not str(key).isdecimal() or not isinstance(values, Mapping) or not {*values} <= {*OF_KEYS}:
        raise ValueError(
            f"optimizer option keys: {key!r}: {values!r}: expected a key's number with some of {', '.join(OF_KEYS)}"
        )
    return {name: _number(name, value) for name, value in values.items()}


def _number(name: str, value: Any) -> Any:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"optimizer option {name}={value!r}: expected a finite number")
    return value


def _flat(state: Any) -> list[Any]:
    """The arrays of nested tuples, in order; None (no state) has none."""
    if isinstance(state, (tuple, list)):
        return [array for part in state for array in _flat(part)]
    return [] if state is None else [state]


@functools.cache
def _class(name: str) -> type:
    row, mx = TABLE[name], mxnet_compat.load()
    return row.own(mx) if row.own else getattr(mx.optimizer, row.name)
