"""What a framework must offer to train here: one `Backend`, what it can do, and the `Trainer` that it makes.

All other modules ask these values; none compares a backend's name. Making a Backend imports no framework: its methods
do, when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dmltrain.arrays import Array
from dmltrain.env import Environment
from dmltrain.layers import Network
from dmltrain.metric import Sums

if TYPE_CHECKING:
    from dmltrain.kvstore.base import KVStore

AllReduce = Callable[[str, Array], Array]  # (name, float64 values) -> their sum over all workers
State = Mapping[str, Any]  # what a checkpoint holds of a trainer


@dataclass(frozen=True)
class Capabilities:
    """What training with a backend can be asked for; the command line offers and refuses accordingly."""

    kvstores: tuple[str, ...]  # names of kvstore types (kvstore/types.py)
    codecs: tuple[str, ...]  # types of gradient compression
    dtypes: tuple[str, ...]
    optimizers: tuple[str, ...]
    transports: tuple[str, ...]  # to servers: auto, tcp, shm
    suffix: str  # of its checkpoint files
    foreign_suffixes: tuple[str, ...] = ()  # of other programs' weight files that it can start from
    compile: bool = False  # whether networks can be compiled
    host_sum: bool = False  # whether the workers of a host are summed there before they go to other hosts
    residuals: bool = False  # whether checkpoints hold the residuals of gradient compression, those of all workers
    update_on_kvstore: bool = False  # where neither the command line nor the environment says otherwise


class Settings(Protocol):
    """What a trainer is told; the command line's Options are one."""

    @property
    def device_names(self) -> tuple[str, ...]: ...  # ('cpu',), ('gpu:0', 'gpu:1') ..: a replica of the network on each
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
    def top_k(self) -> int: ...


class Trainer(Protocol):
    """One worker's network on its devices, joined to the other workers by a kvstore."""

    def seed(self, *numbers: int) -> None:
        """Fix what is drawn from now on (dropout), on every device."""

    def train_step(self, images: Array, labels: Array, total: int, learning_rate: float) -> None:
        """One update from this worker's images (N, C, H, W) float32 and labels (N,) int64, N may be 0.

        `total`: samples of the step that the gradient is the mean over (all workers' in a synchronous job).
        """

    def evaluate(self, images: Array, labels: Array) -> None:
        """Count these samples with the present weights."""

    def take_sums(self) -> Sums:
        """What was counted since the last call, over all devices. Waits for the devices."""

    def synchronize(self) -> None:
        """Wait until the weights are those after the last step."""

    def merge_statistics(self, all_reduce: AllReduce, num_workers: int) -> None:
        """Replace batch-norm statistics by their mean over devices and workers, weighted by samples trained on."""

    def state(self, residuals: Mapping[str, Array] | None = None) -> dict[str, Any]:
        """Everything that the next step depends on, apart from data and seeds, with the kvstore's residuals. Call
        after `synchronize`."""

    def digest(self) -> str:
        """sha256 of all weights and statistics: equal digests mean equal networks, bit for bit."""

    def other_files(self, prefix: str, epoch: int) -> dict[Path, bytes]:
        """What to write beside a checkpoint, for other programs."""

    def describe(self) -> str:
        """The framework, its version and its threads, for the log."""

    def device_memory(self) -> float | None:
        """MiB on this worker's GPUs; None on the CPU."""


class Backend(Protocol):
    """A framework: what it can do, and how its trainers, stores and servers are made."""

    @property
    def name(self) -> str:
        """As --backend names it."""

    @property
    def title(self) -> str:
        """As people write it."""

    @property
    def capabilities(self) -> Capabilities: ...

    def load(self) -> None:
        """Import the framework, which can take seconds in which this process sends no heartbeat."""

    def trainer(self, network: Network, settings: Settings, store: KVStore, state: State | None = None) -> Trainer:
        """Weights are fresh ones from settings.seed, or those of `state`, what `Trainer.state` gave before. Raises
        UserError if the state is another network's, or a device does not exist."""

    def local_store(self, kind: str) -> KVStore:
        """The kvstore of one worker."""

    def store(self, kind: str, staleness: float, environment: Environment) -> KVStore:
        """The kvstore of one worker among many, with its bound on staleness in clocks. Waits until all processes of the
        job are there."""

    def serve(self, environment: Environment) -> str:
        """Be this job's scheduler, or one of its servers, until it ends. Returns why the job was lost, or ''."""

    def encode(self, content: Mapping[str, Any]) -> bytes:
        """A checkpoint, as the content of its file."""

    def decode(self, content: bytes) -> dict[str, Any]:
        """The reverse; runs no code of the file's. Raises UserError for other content."""

    def weights_of(self, source: Path) -> dict[str, Array]:
        """The arrays of another program's file of weights, by name. Raises UserError for other files."""
