"""The command line of the training programs: the common options of MXNet's scripts, and dmltrain's own.

The fields of `Options` are the only table of options: each field has the type, default, help text and valid values of
one option. `parse` returns an `Options` or raises UserError; its message lists the valid values. This module imports no
framework and touches no file.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dmltrain import data, env, kvstore, models, optimizers, schedule
from dmltrain.backends.backend import Capabilities
from dmltrain.backends.table import BACKENDS
from dmltrain.errors import UserError
from dmltrain.kvstore import codec, types

LAST = -1  # --load-epoch last
DTYPES = tuple(dict.fromkeys(dtype for each in BACKENDS.values() for dtype in each.capabilities.dtypes))
SUFFIXES = " or ".join(f"{each.capabilities.suffix} with {name}" for name, each in BACKENDS.items())
STEP_DEFAULTS = " and ".join(
    f"{int(each.capabilities.update_on_kvstore)} with {name}" for name, each in BACKENDS.items()
)
FEWER_CODECS = "; ".join(
    f"{name} has {', '.join(each.capabilities.codecs)}"
    for name, each in BACKENDS.items()
    if set(each.capabilities.codecs) < set(codec.TYPES)
)
# Names of kvstore types, for help texts: those with --staleness, with --update-on-kvstore, with --host-sum.
WITH_STALENESS = ", ".join(types.names(lambda each: each.takes_staleness))
WITH_UPDATE_ON_KVSTORE = ", ".join(types.names(lambda each: len(each.optimizer_on) > 1))
WITH_HOST_SUM = ", ".join(types.names(lambda each: each.sums_in_host))


def integer(minimum: int) -> Callable[[str], int]:
    def parse_integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {minimum}")
        return value

    return parse_integer


def epoch_or_last(text: str) -> int:
    return LAST if text == "last" else integer(0)(text)


def number(minimum: float, *, above: bool = False) -> Callable[[str], float]:
    """A parser of finite numbers of at least `minimum`, or with `above` of numbers greater than it."""

    def parse_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < minimum or (above and value == minimum):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number {'above' if above else 'of at least'} {minimum:g}"
            )
        return value

    return parse_number


def integers(text: str) -> tuple[int, ...]:
    """'200,250' -> (200, 250); '' -> ()."""
    return tuple(integer(0)(part) for part in text.replace(" ", "").split(",") if part)


def one_of(kind: str, names: Collection[str], remark: str = "") -> Callable[[str], str]:
    def parse_name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"unknown {kind} {text!r}{remark}; valid: {', '.join(sorted(names))}")
        return text

    return parse_name


def network_name(text: str) -> str:
    """Case and `_` do not matter, as in MXNet's scripts: 'Inception_BN_28_small' -> 'inception-bn-28-small'."""
    return one_of("network", models.NETWORKS)(text.strip().lower().replace("_", "-"))


def image_shape(text: str) -> tuple[int, int, int]:
    """'3,28,28' -> (3, 28, 28): channels, height, width."""
    sizes = integers(text)
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected channels,height,width such as 3,28,28")
    return sizes[0], sizes[1], sizes[2]


def device_list(text: str) -> tuple[str, ...]:
    """'cpu' -> ('cpu',); 'cpu:2' -> ('cpu', 'cpu'); 'gpu:2' -> ('gpu:0', 'gpu:1')."""
    kind, _, count = text.partition(":")
    if kind not in ("cpu", "gpu"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected cpu, cpu:COUNT or gpu:COUNT")
    indices = range(integer(1)(count or "1"))
    return tuple("cpu" if kind == "cpu" else f"gpu:{index}" for index in indices)


def gpu_list(text: str) -> tuple[str, ...]:
    """'0,2' -> ('gpu:0', 'gpu:2'); '' -> (), the CPU, as in MXNet."""
    indices = integers(text)
    if len(set(indices)) != len(indices):
        raise argparse.ArgumentTypeError(f"{text!r} names the same GPU twice")
    return tuple(f"gpu:{index}" for index in indices)


def path(text: str) -> str:
    return os.path.expanduser(text)


def option(group: str, text: str, parse: Callable[[str], Any], default: Any = None, **more: Any) -> Any:
    """A field of Options; `more` are further arguments of argparse's add_argument."""
    arguments = {"type": parse, "help": text, **more}
    return dataclasses.field(default=default, metadata={"group": group, "arguments": arguments})


@dataclass(frozen=True)
class Options:
    """The options of one run of a training program. `None` stands for the default of the program or the data set."""

    network: str = option("Network", "the network to train: " + ", ".join(models.NETWORKS), network_name, "mlp")
    num_layers: int | None = option(
        "Network", "number of layers, for networks with several depths (resnet)", integer(1)
    )
    dtype: str = option(
        "Network",
        "data type of the computation; weights stay float32: " + ", ".join(DTYPES),
        one_of("dtype", DTYPES),
        "float32",
    )
    memory_format: str = option(
        "Network",
        "memory layout of images with torch: channels_last or contiguous",
        one_of("memory format", ("channels_last", "contiguous")),
        "channels_last",
    )
    compile: int = option("Network", "1: compile the network with torch.compile", integer(0), 0, nargs="?", const=1)
    backend: str = option(
        "Network",
        "the deep-learning framework to use: " + ", ".join(BACKENDS),
        one_of("backend", BACKENDS),
        "torch",
    )

    dataset: str = option(
        "Data", "the data set to train on: " + ", ".join(data.DATASETS), one_of("dataset", data.DATASETS), "digits"
    )
    data_dir: str | None = option("Data", "folder of the data set's files (default: data/DATASET)", path, metavar="DIR")
    num_examples: int | None = option("Data", "number of training samples to use", integer(1))
    image_shape: tuple[int, int, int] | None = option(
        "Data",
        "shape of the network's input images: channels,height,width (default: the data set's)",
        image_shape,
        metavar="C,H,W",
    )
    crop: int | None = option(
        "Data", "height and width of the input images, short for --image-shape C,SIZE,SIZE", integer(1), metavar="SIZE"
    )
    data_nthreads: int = option(
        "Data", "number of threads that prepare batches in advance", integer(1), 1, metavar="COUNT"
    )

    batch_size: int = option("Training", "samples per worker and step; a worker's devices share them", integer(1), 128)
    num_epochs: int = option("Training", "number of epochs in total, counted from the very first", integer(0), 100)
    optimizer: str = option(
        "Training",
        "the optimizer: " + ", ".join(optimizers.NAMES),
        one_of("optimizer", optimizers.NAMES),
        "sgd",
    )
    lr: float = option("Training", "learning rate", number(0.0), 0.1)
    lr_factor: float = option(
        "Training", "factor that multiplies the learning rate at each of --lr-step-epochs", number(0.0, above=True), 0.1
    )
    lr_step_epochs: tuple[int, ...] = option(
        "Training", "epochs at which --lr-factor applies, for example 30,60", integers, (), metavar="E,E"
    )
    warmup_epochs: float = option(
        "Training", "number of epochs over which the learning rate rises from 0", number(0.0), 0.0
    )
    warmup_strategy: str = option(
        "Training",
        "shape of the warm-up: " + ", ".join(schedule.WARMUPS),
        one_of("warm-up strategy", schedule.WARMUPS),
        "linear",
    )
    mom: float = option("Training", "momentum", number(0.0), 0.9)
    wd: float = option(
        "Training", "weight decay; as in MXNet, it applies to weights and gammas only", number(0.0), 0.0001
    )
    seed: int = option(
        "Training", "random seed of initial weights, data order, augmentation and dropout", integer(0), 0
    )

    gpus: tuple[str, ...] = option(
        "Devices", "GPUs to use, for example 0 or 0,2,5 (default: the CPU)", gpu_list, (), metavar="I,I"
    )
    devices: tuple[str, ...] = option(
        "Devices", "devices to use instead of --gpus: cpu, cpu:COUNT or gpu:COUNT", device_list, ()
    )

    kv_store: str = option(
        "Distribution",
        "kvstore type, which says how workers share weights: " + ", ".join(kvstore.TYPES),
        one_of("kvstore", kvstore.TYPES),
        "device",
    )
    staleness: int | None = option(
        "Distribution", f"{WITH_STALENESS}: number of steps a worker may be ahead of the slowest one", integer(0)
    )
    update_on_kvstore: int | None = option(
        "Distribution",
        f"{WITH_UPDATE_ON_KVSTORE}: 1 runs the optimizer on the servers (default: MXNET_UPDATE_ON_KVSTORE, else "
        f"{STEP_DEFAULTS})",
        integer(0),
    )
    gc_type: str = option(
        "Distribution",
        f"gradient compression to and from the servers: {', '.join(codec.TYPES)}; {FEWER_CODECS}",
        one_of("gradient compression", codec.TYPES),
        "none",
    )
    gc_threshold: float | None = option(
        "Distribution",
        "2bit: threshold of the quantization, compared with gradients summed over a step's samples; what is not sent "
        "is added to the next gradient (default: 0.5 with mxnet, levels that adapt to the gradients with torch)",
        number(0.0, above=True),
    )
    gc_ratio: float = option(
        "Distribution", "topk: fraction of a gradient's elements to send", number(0.0, above=True), 0.01
    )
    transport: str | None = option(
        "Distribution",
        "how gradients reach the servers: shm (shared memory), tcp, or auto: shm to servers on the same host, else "
        "tcp (default: DMLTRAIN_TRANSPORT, else auto)",
        one_of("transport", env.TRANSPORTS),
    )
    host_sum: str | None = option(
        "Distribution",
        f"{WITH_HOST_SUM}: auto sums the gradients of a host's workers on that host and sends one stream to servers on "
        "other hosts; off sends one stream per worker (default: DMLTRAIN_HOST_SUM, else auto)",
        one_of("host sum", env.HOST_SUMS),
    )

    disp_batches: int = option("Reports", "log progress every this many batches", integer(1), 20)
    top_k: int = option("Reports", "also report the top-k accuracy for this k; 0: off", integer(0), 0)
    model_prefix: str | None = option(
        "Reports", f"write a checkpoint after each epoch, PREFIX-0001 and so on: {SUFFIXES}", path, metavar="PREFIX"
    )
    load_epoch: int | None = option(
        "Reports",
        "resume from the checkpoint of this epoch; last: from the newest one, or start anew if there is none",
        epoch_or_last,
        metavar="EPOCH",
    )

    @property
    def device_names(self) -> tuple[str, ...]:
        """('cpu',), ('gpu:0', 'gpu:1'), ...: each device has one replica of the network."""
        return self.devices or self.gpus or ("cpu",)


def flag(name: str) -> str:
    """'num_epochs' -> '--num-epochs'."""
    return "--" + name.replace("_", "-")


FLAGS = tuple(flag(field.name) for field in dataclasses.fields(Options))


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default after each help text, except where the default is None or ()."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, ()) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def parser(prog: str, description: str = "", defaults: Mapping[str, Any] | None = None) -> Parser:
    made = Parser(prog=prog, description=description, formatter_class=_Help)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(Options):
        group = field.metadata["group"]
        if group not in groups:
            groups[group] = made.add_argument_group(group)
        groups[group].add_argument(flag(field.name), default=field.default, **field.metadata["arguments"])
    made.set_defaults(**(defaults or {}))
    return made


def parse(
    argv: Sequence[str], prog: str = "train", description: str = "", defaults: Mapping[str, Any] | None = None
) -> Options:
    """Parse the arguments after the program's name; `defaults` are the program's own. Raises UserError."""
    defaults = dict(defaults or {})
    depth = defaults.pop("num_layers", None)
    values, unknown = parser(prog, description, defaults).parse_known_args(list(argv))
    if unknown:
        raise UserError(_unknown(unknown[0]))
    if values.num_layers is None and values.network == defaults.get("network"):
        values.num_layers = depth  # this default belongs to the program's own network
    return _checked(Options(**vars(values)))


def _unknown(word: str) -> str:
    name = word.split("=")[0]
    near = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.7)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown option {name}{hint}; valid options: {' '.join(FLAGS)}"


def _checked(options: Options) -> Options:
    """Check what concerns more than one option; --crop becomes --image-shape."""
    if options.devices and options.gpus:
        raise UserError("--devices and --gpus exclude each other: give one of them")
    if options.load_epoch is not None and not options.model_prefix:
        raise UserError("--load-epoch needs --model-prefix, the PREFIX of the checkpoint's file name PREFIX-0001.pt")
    types.find(options.kv_store).bound(options.staleness)
    _check_compression(options)
    _check_backend(options)
    if len(options.device_names) > options.batch_size:
        raise UserError(f"--batch-size {options.batch_size} cannot be split over {len(options.device_names)} devices")
    if options.crop is not None:
        channels = options.image_shape[0] if options.image_shape else 3
        options = dataclasses.replace(options, image_shape=(channels, options.crop, options.crop))
    return options


def _check_compression(options: Options) -> None:
    if options.gc_ratio > 1.0:
        raise UserError(f"--gc-ratio {options.gc_ratio:g}: expected a fraction of the elements, at most 1")
    if options.gc_type != "none" and not types.find(options.kv_store).distributed:
        raise UserError(
            f"--gc-type {options.gc_type} needs a distributed kvstore; --kv-store {options.kv_store} sends nothing: "
            "leave --gc-type out"
        )


def _check_backend(options: Options) -> None:
    """Raise UserError for the first option that the chosen backend does not support; the message says which do."""
    able = {name: backend.capabilities for name, backend in BACKENDS.items()}
    for name, wanted, offered in _needs(options):
        if wanted in offered(able[options.backend]):
            continue
        others = [f"--backend {other}" for other, can in able.items() if wanted in offered(can)]
        given = flag(name) if name == "compile" else f"{flag(name)} {getattr(options, name)}"
        supported = " or ".join(map(str, offered(able[options.backend])))
        fixes = ["leave it out" if name == "compile" else f"use {supported}", *others]
        raise UserError(f"{given}: --backend {options.backend} does not support this; {', or '.join(fixes)}")


def _needs(options: Options) -> list[tuple[str, Any, Callable[[Capabilities], Collection[Any]]]]:
    """(option, the capability that it needs, what a backend offers)."""
    return [
        ("kv_store", types.find(options.kv_store).name, lambda can: can.kvstores),
        ("gc_type", options.gc_type, lambda can: can.codecs),
        ("transport", options.transport or "auto", lambda can: can.transports),
        ("compile", bool(options.compile), lambda can: (False, True) if can.compile else (False,)),
        ("dtype", options.dtype, lambda can: can.dtypes),
        ("optimizer", options.optimizer, lambda can: can.optimizers),
    ]
