"""Scoring: the accuracy of a checkpoint on a data set, by one process or by the workers of a job.

It takes the options of the training programs, and checkpoints of both backends and of MXNet's own programs. What
--network, --num-layers and --image-shape do not say is taken from the checkpoint. (MXNet's
example/image-classification/score.py.)
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dmltrain import data, fit, kvstore, models
from dmltrain.backends.table import BACKENDS
from dmltrain.base import env
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import pretrained_weights
from dmltrain.checkpoints.pretrained_weights import Trained
from dmltrain.kvstore.base import KVStore
from dmltrain.logs import record
from dmltrain.models import graph_file
from dmltrain.mxnet_files import weights
from dmltrain.options import LAST, Options, gives, parse, usual_top_k
from dmltrain.train import common_network, dry_parse, evaluation, loading
from dmltrain.version import __version__


def main(
    argv: Sequence[str] | None = None,
    *,
    prog: str = "",
    description: str = "",
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Score a checkpoint and return the exit code. `defaults` replace defaults of `Options`, by field name."""
    words = sys.argv[1:] if argv is None else list(argv)
    prog = prog or os.path.basename(sys.argv[0])

    def run() -> None:
        if file := env.check_file():
            print(dry_parse.line(file, lambda given: parse(given, prog, description, defaults)), flush=True)
            return
        options = parse(words, prog, description, defaults)
        if not options.model_prefix:
            raise UserError("--model-prefix is missing: the PREFIX of the checkpoint PREFIX-0001.pt to score")
        given = frozenset(name for name in ("network", "top_k") if gives(words, name))
        score(options, given, shlex.join([sys.argv[0], *words]))

    return fit.exit_code(prog, run)


def score(options: Options, given: Collection[str], command: str) -> None:
    """Log the accuracy of the checkpoint of --model-prefix and --load-epoch (default: the newest).

    given: which of network and top_k the user gave; the others have defaults that the checkpoint may replace.
    """
    options = replace(options, update_on_kvstore=0)
    if env.read().role == "worker":
        BACKENDS[options.backend].load()
        options = options.found()
    store = kvstore.create(
        options.kv_store, backend=options.backend, transport=options.transport, host_sum=options.host_sum
    )  # a scheduler or server serves the job here, and exits
    try:
        _score(options, given, store, command)
    except BaseException as error:
        store.abort(str(error) or type(error).__name__)
        raise
    store.close()


def _score(options: Options, given: Collection[str], store: KVStore, command: str) -> None:
    log = record.logger(store.rank)
    log.info("dmltrain %s: %s", __version__, command)
    assert options.model_prefix
    asked = None if options.load_epoch == LAST else options.load_epoch
    trained = pretrained_weights.shared(options.model_prefix, asked, store, log, iteration=options.load_iteration)
    options = as_saved(options, trained, given)
    dataset = loading.load_dataset(options, store, log.warning)
    if not len(dataset.validation):
        raise UserError("there are no validation data to score: give --data-val")
    loading.note_input(trained.source, options, dataset, log)
    network = common_network.create(options, dataset.num_classes, dataset.image_shape, store)
    names = graph_file.names_in_files(options.network, network) if trained.source.suffix == weights.SUFFIX else {}
    state: dict[str, Any] = {"model": weights.fitting(trained.source, trained.weights, network, names)}
    if trained.average and "ema_decay" not in BACKENDS[options.backend].capabilities.lacks:
        options = replace(options, ema_decay=0.0)  # so that there is an average; no step changes it
        average = weights.fitting(trained.source, trained.average, network)
        state["average"] = {"model": average, "epochs": 0, "last": 0}
    trainer = BACKENDS[options.backend].trainer(network, options, store, state, dataset.normalisation)
    began = time.perf_counter()
    sums, of_average = evaluation.evaluate(
        trainer,
        dataset.validation,
        store,
        options.batch_size,
        loading.threads(options, dataset),
        options.prefetch_bytes,
        loading.has_own_validation(options, dataset, store),
    )
    loading.check_broken(dataset, store, log)
    speed = sums.samples / (time.perf_counter() - began)
    epoch = epoch_of(trained.source)
    for prefix, found in (("Validation", sums), ("Validation-average", of_average)):
        for name, value in found.metrics(options.top_k, options.loss).items() if found else ():
            log.info(record.value(epoch, f"{prefix}-{name}", value))
    log.info(record.value(epoch, "Speed", speed))
    log.info("Scored %s on %d samples of %s", trained.source, sums.samples, dataset.name)


def as_saved(options: Options, trained: Trained, given: Collection[str]) -> Options:
    """The options with what they do not say of the network: as the checkpoint, or the graph beside it, says."""
    if "network" not in given:
        options = replace(options, **network_of(trained))
    if options.image_shape is None and trained.facts.get("image_shape"):
        options = replace(options, image_shape=tuple(trained.facts["image_shape"]))
    if options.num_classes is None and (options.data_val or data.DATASETS[options.dataset].reads_files):
        shape = options.image_shape or data.DATASETS[options.dataset].image_shape
        graph = graph_file.is_graph(options.network) and models.create(options.network, None, None, shape)
        options = replace(options, num_classes=graph.num_classes if graph else trained.facts.get("num_classes"))
    if options.num_classes is not None and "top_k" not in given:
        options = replace(options, top_k=usual_top_k(options.top_k, options.num_classes))
    return options


def epoch_of(source: Path) -> int:
    """The epoch, counted from 0 as in logs, after which the checkpoint was written, or in which."""
    number = re.search(r"-(\d{4,})(_iter_\d+)?\.\w+$", source.name)
    assert number
    return int(number[1]) if number[2] else max(0, int(number[1]) - 1)


def network_of(trained: Trained) -> dict[str, Any]:
    """--network and --num-layers as the checkpoint, or the graph beside it, say. Raises UserError if neither does."""
    if trained.source.suffix == weights.SUFFIX:
        prefix = re.sub(r"-\d{4,}\.\w+$", "", str(trained.source))
        return {"network": f"{prefix}-symbol.json", "num_layers": None}
    network = str(trained.facts["network"])
    keys = [key for key in models.NETWORKS if network == key or network.startswith(f"{key}-")]
    if not keys:
        raise UserError(
            f"{trained.source} has the weights of network {network!r}: name it with --network and its options"
        )
    return {"network": max(keys, key=len), "num_layers": trained.facts["num_layers"]}
