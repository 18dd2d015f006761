"""All options of the training programs: the only table of them, one file and one base of Options for each group."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dmltrain.backends.table import BACKENDS
from dmltrain.base import env
from dmltrain.options.data import DataOptions
from dmltrain.options.devices import DeviceOptions
from dmltrain.options.distribution import DistributionOptions
from dmltrain.options.emulation import EmulationOptions
from dmltrain.options.field import Group, flag
from dmltrain.options.fine_tuning import FineTuningOptions
from dmltrain.options.images import ImageOptions
from dmltrain.options.learning_rate import LearningRateOptions
from dmltrain.options.network import NetworkOptions
from dmltrain.options.recipe import RecipeOptions
from dmltrain.options.report import ReportOptions
from dmltrain.options.training import TrainingOptions
from dmltrain.options.values import AUTO


@dataclass(frozen=True)
class Options(
    EmulationOptions,
    ReportOptions,
    FineTuningOptions,
    DistributionOptions,
    DeviceOptions,
    RecipeOptions,
    LearningRateOptions,
    TrainingOptions,
    ImageOptions,
    DataOptions,
    NetworkOptions,
):  # dataclass takes the fields of the last base first
    """The options of one run of a training program. `None` stands for the default of the program or the data set."""

    @property
    def device_names(self) -> tuple[str, ...]:
        """('cpu',), ('gpu:0', 'gpu:1'), ...: each device has one replica of the network. ('auto',): see `found`."""
        return self.devices or self.gpus or ("cpu",)

    @property
    def repeatable(self) -> bool:
        """Whether GPUs compute so that the same run gives the same bits again."""
        return bool(self.audit or self.replay) if self.deterministic is None else self.deterministic

    def found(self) -> Options:
        """The same with the device that --devices auto stands for. Imports the framework."""
        if self.devices != (AUTO,):
            return self
        gpus = BACKENDS[self.backend].gpus()
        return dataclasses.replace(self, devices=(f"gpu:{env.local_rank() % gpus}" if gpus else "cpu",))


GROUPS: tuple[type[Group], ...] = tuple(base for base in Options.__bases__ if issubclass(base, Group))
ON_MEMBERS = tuple(
    field.name
    for group in GROUPS
    if group.equal_on_members
    for field in dataclasses.fields(group)  # type: ignore[arg-type]
)  # names of the fields that all members of an elastic job have in common
FLAGS = tuple(flag(field.name) for field in dataclasses.fields(Options))
