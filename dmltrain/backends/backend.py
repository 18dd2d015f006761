"""The interface of a framework: its `Backend`, with its capabilities, and the `Trainer` that the backend makes.

Other modules ask the capabilities and do not compare names of backends. Creating a Backend imports no framework; its
methods import it when they are called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dmltrain.base.arrays import Array
from dmltrain.base.env import Environment
from dmltrain.base.normalisation import Normalisation
from dmltrain.data.images.mixing import Mixing
from dmltrain.layers import Network, Parameter
from dmltrain.logs.metric import Sums

if TYPE_CHECKING:
    from dmltrain.kvstore.base import KVStore

AllReduce = Callable[[str, Array], Array]  # (name, float64 values) -> their sum over all workers
TrainerState = Mapping[str, Any]  # a trainer's state in a checkpoint


@dataclass(frozen=True)
class Capabilities:
    """What a backend supports; the command line rejects everything else."""

    kvstores: tuple[str, ...]  # names of kvstore types (kvstore/types.py)
    codecs: tuple[str, ...]  # types of gradient compression
    dtypes: tuple[str, ...]
    optimizers: tuple[str, ...]
    transports: tuple[str, ...]  # to servers: auto, tcp, shm
    suffix: str  # of its checkpoint files
    compile: bool = False  # whether it can compile networks
    server_shares: tuple[str, ...] = ("equal",)  # of weights on servers (env.SERVER_SHARES)
    factors: bool = False  # whether dense layers can send sufficient factors
    host_sum: bool = False  # whether gradients of a host's workers are summed there before they go to other hosts
    residuals: bool = False  # whether checkpoints hold all workers' residuals of gradient compression
    arithmetic: bool = False  # whether one can choose how GPUs compute (--deterministic, --tf32)
    update_on_kvstore: bool = False  # the default, without an option and an environment variable
    lacks: Mapping[str, str] = field(default_factory=dict)  # options, by field or `field=value`, and why it lacks them
    reasons: Mapping[str, str] = field(default_factory=dict)  # option -> why its field above lacks what others have


class RecipeSettings(Protocol):
    """Those of the group Recipes, and --loss."""

    @property
    def loss(self) -> tuple[str, ...]: ...
    @property
    def label_smoothing(self) -> float: ...
    @property
    def bce_threshold(self) -> float | None: ...
    @property
    def clip_gradient_norm(self) -> float | None: ...
    @property
    def clip_gradient_value(self) -> float | None: ...
    @property
    def no_wd_on(self) -> tuple[str, ...]: ...
    @property
    def ema_decay(self) -> float | None: ...
    @property
    def swa_from(self) -> int | None: ...
    @property
    def val_flip(self) -> bool: ...
    @property
    def sync_bn(self) -> bool: ...


class Settings(RecipeSettings, Protocol):
    """The options that a trainer reads; the command line's Options implement it."""

    @property
    def device_names(self) -> tuple[str, ...]: ...  # ('cpu',) or ('gpu:0', 'gpu:1'), one replica on each
    @property
    def dtype(self) -> str: ...
    @property
    def memory_format(self) -> str: ...
    @property
    def compile(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def mom(self) -> float: ...
    @property
    def wd(self) -> float: ...
    @property
    def warmup_strategy(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def update_on_kvstore(self) -> int | None: ...
    @property
    def gc_type(self) -> str: ...
    @property
    def gc_threshold(self) -> float | None: ...
    @property
    def gc_ratio(self) -> float: ...
    @property
    def factors(self) -> str: ...
    @property
    def local_steps(self) -> int | None: ...
    @property
    def outer_lr(self) -> float | None: ...
    @property
    def outer_momentum(self) -> float | None: ...
    @property
    def macrobatch_size(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def repeatable(self) -> bool: ...  # on GPUs
    @property
    def tf32(self) -> bool | None: ...  # None: the framework's default


def batches_of_a_step(settings: Settings, num_workers: int) -> int:
    """How many batches of all workers make a step: as many as --macrobatch-size needs, or one."""
    return max(1, math.ceil(settings.macrobatch_size / (settings.batch_size * num_workers)))


def samples_of_a_step(settings: Settings, store: KVStore) -> int:
    """Of one batch of each worker that takes part. As in MXNet's programs, --gc-threshold applies to the sum over a
    step's samples; their mean would hardly ever reach it."""
    return settings.batch_size * (store.num_workers if store.kvstore_type.steps_together else 1)


WITHOUT_DECAY = {"norms": ("gamma", "beta"), "biases": ("bias",)}  # --no-wd-on -> the kinds of arrays


def decayed(network: Network, settings: Settings) -> list[Parameter]:
    """The network's learned arrays, with the weight decay that the settings leave them."""
    spared = {kind for name in settings.no_wd_on for kind in WITHOUT_DECAY[name]}
    return [
        replace(parameter, wd_mult=0.0) if parameter.kind in spared else parameter for parameter in network.parameters()
    ]


@dataclass(frozen=True)
class CommonArray:
    """An array of floating-point numbers that all workers of a synchronous job have in common."""

    name: str
    read: Callable[[], Array]
    write: Callable[[Array], None]  # on all devices


class Pace(Protocol):
    """A trainer calls its methods at three points of each batch. They may sleep, which makes a worker slower."""

    def begin(self) -> None:
        """The computation begins; waits for the kvstore may follow."""

    def between(self) -> None:
        """The forward pass is complete on the device. No gradient is sent yet."""

    def end(self) -> None:
        """The computation is complete on the device."""


class Average(Protocol):
    """An average of a network's weights. `Trainer.evaluate` adds its metrics, too."""

    def end_epoch(self, epochs: int) -> None:
        """So many whole epochs are trained, and all workers have the same weights."""

    def take_sums(self) -> Sums | None:
        """As Trainer's; None if there is no average yet."""

    def digest(self) -> str:
        """As Trainer's; "" if there is no average yet."""


class Trainer(Protocol):
    """One worker's network on its devices, connected to the other workers by a kvstore."""

    @property
    def average(self) -> Average | None: ...  # None unless --ema-decay or --swa-from asks for one

    pace: Pace | None  # None at first; with a Pace the trainer waits for its devices

    def seed(self, *numbers: int) -> None:
        """Seed the framework's random numbers (dropout) on every device."""

    def train_step(
        self,
        images: Array,
        labels: Array,
        total: int,
        learning_rate: float,
        checksum: Array | None = None,
        mixing: Mixing | None = None,
    ) -> Array | None:
        """One update from this worker's images (N, C, H, W) and labels (N,) int64; N may be 0. uint8 images, in any
        order of memory, are normalised on the device. float32 images are the network's input without a change.

        `total`: number of samples in the mean gradient of this step (of all workers, if they step together). 0: this
        worker makes no step; it only takes part in the average of weights.

        `checksum`: in an elastic job (3,) float64, the number of this worker's samples and two sums over them that the
        caller chooses. `total` is then the number of samples that all workers got. Returns the sum of the checksums of
        the workers whose gradients the step has; the mean is over their samples. Without a checksum it returns None.

        `mixing`: of the samples of each device, after the normalisation. The metrics compare with the label that has
        the larger share.
        """

    def accumulate(self, images: Array, labels: Array, total: int, mixing: Mixing | None = None) -> None:
        """Add the gradient of these samples to that of the next `train_step`, which has the same `total`."""

    def evaluate(self, images: Array, labels: Array) -> None:
        """Add the metrics of these samples with the current weights."""

    def take_sums(self) -> Sums:
        """The metrics since the last call, summed over all devices. Waits for the devices."""

    def settle(self) -> None:
        """Wait until this worker's weights include its last step."""

    def synchronize(self) -> None:
        """Wait until the weights include the last step of all workers. Every worker must call it."""

    def merge_statistics(self, all_reduce: AllReduce, num_workers: int) -> None:
        """Replace batch-norm statistics by their mean over devices and workers, weighted by training samples."""

    def state(
        self, residuals: Mapping[str, Array] | None = None, others: Sequence[TrainerState] = ()
    ) -> dict[str, Any]:
        """Everything that the next step depends on except data and seeds, including the kvstore's residuals and the
        `own_state` of workers 1, 2, ... Call `synchronize` first."""

    def shared_state(self) -> dict[str, Any]:
        """What a worker that joins gets of this one. Where each worker steps alone, these are the weights at the last
        average, without the state of this worker's optimizer."""

    def take_state(self, state: TrainerState, only_step: bool = False) -> None:
        """Go on from the result of another worker's `shared_state`, also in the middle of a run or of a step.
        `only_step`: keep what a step of all workers does not change, which are this worker's batch-norm statistics and,
        where it steps alone, the state of its optimizer."""

    def own_state(self) -> dict[str, Any]:
        """The part of the state that differs between workers; empty if none does, or if the servers have it."""

    def common_arrays(self) -> list[CommonArray]:
        """Weights, statistics, and the state of an optimizer that all workers run alike. Call `synchronize` first."""

    def digest(self) -> str:
        """sha256 of all weights and statistics: equal digests mean bit-identical networks."""

    def other_files(self, prefix: str, epoch: int) -> dict[Path, bytes]:
        """Files for other programs, to be written with a checkpoint: path -> content."""

    def describe(self) -> str:
        """The framework, its version and its threads, for the log."""

    def choices(self) -> Sequence[str]:
        """The decisions that it has made before the first step, one line each, for the log."""

    def device_memory(self) -> float | None:
        """MiB on this worker's GPUs; None on the CPU."""


class Backend(Protocol):
    """A framework: its capabilities, and how to make its trainers, stores and servers."""

    @property
    def name(self) -> str:
        """Its name for --backend."""

    @property
    def title(self) -> str:
        """Its name in messages."""

    @property
    def capabilities(self) -> Capabilities: ...

    def load(self) -> None:
        """Import the framework. This can take seconds, in which the process sends no heartbeat."""

    def gpus(self) -> int:
        """How many GPUs the framework can use in this process."""

    def trainer(
        self,
        network: Network,
        settings: Settings,
        store: KVStore,
        state: TrainerState | None = None,
        normalisation: Normalisation | None = None,
    ) -> Trainer:
        """A trainer with initial weights from settings.seed, or with `state`, an earlier result of `Trainer.state`.
        `normalisation`: of uint8 images (None: there are none). Raises UserError if the state does not fit the network,
        or a device does not exist."""

    def local_store(self, kind: str) -> KVStore:
        """The kvstore of a single worker."""

    def store(self, kind: str, staleness: float, environment: Environment) -> KVStore:
        """The kvstore of one of several workers; `staleness` is its bound in clocks. Waits until all processes of the
        job have registered."""

    def serve(self, environment: Environment) -> str:
        """Run as the job's scheduler or as a server until the job ends. Returns why the job was lost, or ''."""

    def encode(self, content: Mapping[str, Any]) -> bytes:
        """The content of a checkpoint file."""

    def decode(self, content: bytes) -> dict[str, Any]:
        """The inverse of `encode`; never runs code from the file. Raises UserError for other content."""
