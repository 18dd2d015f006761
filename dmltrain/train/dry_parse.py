"""Checks command lines of a training program without training, for `dmltrain-experiment`.

docs/environment.md has the contract. With DMLTRAIN_CHECK=FILE, a JSON list of lists of arguments, a program parses each
with its own parser and defaults, prints one line

    DMLTRAIN_CHECK [{"error": null, "options": {"lr": 0.1, ...}, "parameters": 78042, "distributed": true}, ...]

on standard output and exits with 0. It reads no data, makes no connection and imports no framework.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dmltrain import models
from dmltrain.base.errors import UserError
from dmltrain.kvstore import types
from dmltrain.options import Options
from dmltrain.train import loading

MARK = "DMLTRAIN_CHECK"


def line(file: str, parse: Callable[[Sequence[str]], Options]) -> str:
    """The line to print for the command lines in `file`. UserError if it is not such a file."""
    try:
        lists = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{MARK}={file}: {error}: expected a file with a JSON list of lists of arguments") from None
    if not isinstance(lists, list) or not all(
        isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists
    ):
        raise UserError(f"{MARK}={file}: expected a JSON list of lists of arguments")
    return f"{MARK} {json.dumps([answer(words, parse) for words in lists])}"


def answer(words: Sequence[str], parse: Callable[[Sequence[str]], Options]) -> dict[str, Any]:
    """error: why training would refuse the arguments, None if it would not. options: all, by field name, as JSON has
    them. parameters: of the network, None where only the data or a checkpoint tell."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # --help and --recipe list print
            options = parse(words)
        parameters = _parameters(options)
    except UserError as error:
        return {"error": str(error)}
    except SystemExit:  # --help, --recipe list
        return {"error": "--help only prints the options, and --recipe list the recipes: remove it"}
    return {
        "error": None,
        "options": dataclasses.asdict(options),
        "parameters": parameters,
        "distributed": types.find(options.kv_store).distributed,
    }


def _parameters(options: Options) -> int | None:
    if options.pretrained_model:
        return None
    shape, classes = loading.shape_and_classes(options)
    key = tuple(sorted(options.network_options.items()))
    return _count(options.network, options.num_layers, classes, shape, key)


@lru_cache(maxsize=256)
def _count(
    network: str, num_layers: int | None, classes: int, shape: tuple[int, int, int], more: tuple[tuple[str, Any], ...]
) -> int:
    return models.create(network, num_layers, classes, shape, **dict(more)).num_parameters
