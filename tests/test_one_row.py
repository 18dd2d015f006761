"""A network, data set, format of images, optimizer, codec, log dialect, section of the page, format of results, kind of
plot or group of options is one file and one row: here is one of each, in a copy of the tree, and programs use them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.copied_tree import copy_packages, one_more

pytest.importorskip("torch", reason="torch is not installed: nothing is trained with the new things")

NETWORK = '''"""A network of one layer."""

from dmltrain.layers import Dense, Flatten, Network, chain
from dmltrain.models.architecture import Architecture


def build(num_layers, num_classes, image_shape):
    return Network("newnet", chain(Flatten(), Dense("fc", num_classes)), image_shape, num_classes)


ARCHITECTURE = Architecture(build, image_shape=(1, 4, 4), num_classes=3)
'''
DATASET = '''"""Three classes of grey images, each of one brightness."""

import numpy as np

from dmltrain.data.augment import Augmentation
from dmltrain.data.dataset import Dataset, Description, Split
from dmltrain.base.normalisation import Normalisation

SHAPE = (1, 4, 4)


def load(data_dir=None, *, num_examples=None, image_shape=None, seed=0, download=True):
    labels = np.arange(num_examples or 96) % 3
    images = np.zeros((len(labels), *SHAPE), np.uint8)
    for number in range(3):
        images[labels == number, :, number, :] = 200
    split = Split(images, labels, Augmentation(crop=SHAPE[1:]))
    return Dataset("newdata", split, split, 3, SHAPE, Normalisation((127.0,), (60.0,)))


DESCRIPTION = Description(3, SHAPE, load)
'''
READER = '''"""Lines of text: a label and the name of a file."""

import numpy as np

from dmltrain.data.readers.reader import Format, Record


class Lines:
    class_names = ("cat", "dog")

    def __init__(self, source):
        self._path, self._lines = source.path, source.path.read_text().splitlines()

    def __len__(self):
        return len(self._lines)

    def read(self, index):
        label, name = self._lines[index].split()
        return Record(np.array([label], np.float32), self._path.with_name(name).read_bytes())


FORMAT = Format("lines of text", lambda path: path.suffix == ".lines", Lines)
'''
OPTIMIZER = '''"""newopt: the sign of the gradient, with a class of its own."""

from dmltrain.optimizers.optimizer import Optimizer, Torch


def torch_class(torch):
    class Signs(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1, weight_decay=0.0, sharpness=1.0):
            super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "sharpness": sharpness})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for each in group["params"]:
                    each -= group["lr"] * torch.tanh(each.grad * 1e6)

    return Signs


OPTIMIZER = Optimizer("newopt", Torch("Signs", ("weight_decay", "sharpness"), own=torch_class))
'''
CODEC = '''"""Three bytes an element: float32 without its lowest byte."""

from dataclasses import dataclass

import numpy as np

from dmltrain.kvstore.codec.block import BlockCodec


@dataclass(frozen=True)
class ThreeBytes(BlockCodec):
    """The upper three bytes."""

    name = "24bit"
    number = 7
    size = "3n"
    needs_residual = False

    def nbytes(self, length):
        return 3 * length

    def write(self, part, start, target, length):
        kept = part.view(np.uint8).reshape(-1, 4)[:, 1:]
        target.reshape(-1, 3)[start : start + part.size] = kept

    def read(self, data, start, length, into):
        into.view(np.uint8).reshape(-1, 4)[:] = 0
        into.view(np.uint8).reshape(-1, 4)[:, 1:] = data.reshape(-1, 3)[start : start + into.size]
'''
DIALECT = '''"""Logs of Newtrainer: `round 3 hit 0.5`."""

import re
from array import array

from dmltrain.report.runs.run import FileValues

LINE = re.compile(rb"round (\\d+) hit ([\\d.]+)")


class New:
    programs = ("Newtrainer",)
    sign = rb"round \\d+"

    def __init__(self):
        self._epochs = {}

    def feed(self, block):
        lines = LINE.findall(block.data)
        for epoch, value in lines:
            self._epochs[int(epoch)] = {"train_accuracy": array("d", [float(value)])}
        return bool(lines)

    def runs(self):
        return [FileValues(self._epochs)] if self._epochs else []
'''
SECTION = '''"""What is new."""

from dmltrain.report.page.html import element
from dmltrain.report.page.sections.section import Section


def section(context):
    return Section("New section", [element("p", f"{len(context.runs)} run")])
'''
FORMAT = '''"""An outcome as its title."""


def text(outcome):
    return f"the title is {outcome.title}"
'''
PLOT = '''"""Nothing but axes, as wide as chosen."""

from dmltrain.experiment.results.plots import choice
from dmltrain.report import style

TITLE = "A new plot"
CHOICES = {"grid": choice.switch}


def draw(shown, chosen):
    figure, (axes,) = style.figure(1)
    axes.grid(chosen.get("grid", False))
    return figure
'''
OPTIONS = '''"""The options of the group News."""

from dataclasses import dataclass

from dmltrain.base.errors import UserError
from dmltrain.options.field import Group, option


@dataclass(frozen=True)
class NewOptions(Group):
    """See `Options`."""

    equal_on_members = True
    lucky: int = option("News", "a number", int, 7)

    @staticmethod
    def check(options):
        if options.lucky == 13:
            raise UserError("--lucky 13 is not")
'''
NEW = (  # file, its content, the opening line of the table in its folder, the row
    ("models/newnet", NETWORK, "NETWORKS: dict[str, Architecture] = {", '"newnet": newnet.ARCHITECTURE'),
    ("data/newdata", DATASET, "DATASETS: dict[str, Description] = {", '"newdata": newdata.DESCRIPTION'),
    ("data/readers/lines", READER, "FORMATS: tuple[Format, ...] = (", "lines.FORMAT"),
    ("optimizers/newopt", OPTIMIZER, "TABLE: tuple[Optimizer, ...] = (", "newopt.OPTIMIZER"),
    ("kvstore/codec/three", CODEC, "TABLE: tuple[type[Codec], ...] = (", "three.ThreeBytes"),
    ("report/dialect/new", DIALECT, "DIALECTS: tuple[type[Dialect], ...] = (", "new.New"),
    (
        *("report/page/sections/newest", SECTION),
        *("SECTIONS: dict[str, Callable[[Context], Section | None]] = {", '"newest": newest.section'),
    ),
    (
        *("experiment/results/formats/title", FORMAT),
        *("FORMATS: dict[str, Callable[[Outcome], str]] = {", '"title.txt": title.text'),
    ),
    ("experiment/results/plots/empty", PLOT, "KINDS: dict[str, PlotKind] = {", '"empty": empty'),
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = copy_packages(tmp_path_factory.mktemp("tree"), "dmltrain", "launch/dmltrain_launch", "examples", "docs")
    for file, content, opening, row in NEW:
        folder, _, name = file.rpartition("/")
        table, imported = f"dmltrain/{folder}/__init__.py", f"from dmltrain.{folder.replace('/', '.')} import {name}\n"
        one_more(copy, f"dmltrain/{file}.py", content, table, f"{opening}\n", f"    {row},\n", imported)
    bases, imported = "@dataclass(frozen=True)\nclass Options(\n", "from dmltrain.options import new\n"
    one_more(
        copy, "dmltrain/options/new.py", OPTIONS, "dmltrain/options/table.py", bases, "    new.NewOptions,\n", imported
    )
    return copy


def run(tree: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree}/launch", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], env=environment, cwd=tree, capture_output=True, text=True)


TRAIN = ("examples/train_digits.py", "--network", "newnet", "--dataset", "newdata", "--lr", "0.1", "--num-epochs", "8")


def test_help_and_errors_show_each(tree):
    shown = " ".join(run(tree, "examples/train_digits.py", "--help").stdout.split())
    for table in ("the network to train: newnet,", "the data set to train on: newdata,", "the optimizer: newopt,"):
        assert table in shown
    assert "none, 24bit," in shown
    assert "of Newtrainer, dmltrain, MXNet" in " ".join(run(tree, "-m", "dmltrain.report.cli", "--help").stdout.split())
    refused = run(tree, *TRAIN, "--optimizer", "newopt", "--backend", "mxnet")
    assert refused.returncode == 2
    assert "none of this name; use sgd or nag" in refused.stderr
    assert "or --backend torch" in refused.stderr


def test_they_train_in_a_job(tree, tmp_path):
    """With the new codec between the processes and the new optimizer on the server."""
    job = ("-m", "dmltrain_launch.cli", "--launcher", "local", "-n", "1", "-s", "1", "--log-dir", str(tmp_path))
    words = (*TRAIN, "--optimizer", "newopt", "--kv-store", "dist_sync", "--gc-type", "24bit")
    done = run(tree, *job, *words, "--update-on-kvstore", "1")
    text = (tmp_path / "worker-0.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert "Epoch[7] Validation-accuracy=1.000000" in text


ASK = """
from dmltrain import options
from dmltrain.base.errors import UserError
from dmltrain.data.readers import open_reader
from dmltrain.kvstore import codec
from dmltrain.kvstore.transport import wire
from dmltrain.options.table import ON_MEMBERS
from dmltrain.train import measure

print(options.parse(["--lucky", "8"]).lucky, "lucky" in ON_MEMBERS)
reader = open_reader("train.lines")
print(len(reader), reader.read(1).labels, reader.read(1).image)
print(measure.compression(options.Options())["24bit"], wire.MAX_DTYPE, codec.make({"type": "24bit"}).number)
for refused in (lambda: options.parse(["--lucky", "13"]), lambda: open_reader("dmltrain/py.typed")):
    try:
        refused()
    except UserError as error:
        print(error)
"""


def test_options_formats_of_images_and_codecs_are_known_to_all_who_ask_for_them(tree):
    """Options are compared between members, the forecast includes a codec, and frames take its number."""
    (tree / "train.lines").write_text("1 dog.jpg\n0 cat.jpg\n")
    (tree / "cat.jpg").write_text("meow")
    done = run(tree, "-c", ASK)
    assert done.stdout.startswith("8 True\n2 [0.] b'meow'\n(0.75, 0.75) 7 7\n--lucky 13 is not\n"), done
    assert "py.typed: unknown format; expected one of: lines of text; " in done.stdout


def test_the_parser_reads_the_dialect(tree):
    (tree / "new.log").write_text("hello\nround 0 hit 0.25\nround 1 hit 0.75\n")
    done = run(tree, "-m", "dmltrain.report.cli", "new.log")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].split()[:4] == ["|", "2", "|", "0.750000"]


def test_results_have_the_format_and_the_plot_and_the_page_the_section(tree):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no plot is drawn")
    (tree / "new.log").write_text("round 0 hit 0.25\nround 1 hit 0.75\n")
    (tree / "results").mkdir()
    program = (
        "from pathlib import Path; from dmltrain.experiment.plan import file;"
        "from dmltrain.experiment import results; from dmltrain.report.page import cli;"
        "experiment = file.parse(b'program: t.py\\nplots: [empty: {grid: true}]', Path('x.yaml'));"
        "results.write(Path('results'), experiment, []); cli.main(['new.log', '-o', 'new.html'])"
    )
    assert run(tree, "-c", program).stderr == ""
    assert (tree / "results/title.txt").read_text() == "the title is x"
    assert "A new plot" in (tree / "results/plots/1-empty.svg").read_text()
    assert "New section" in (tree / "new.html").read_text()


def test_the_documentations_tables_have_them(tree):
    pytest.importorskip("sphinx", reason="sphinx is not installed: it makes the documentation's tables")
    program = (
        "import sys; sys.path.insert(0, 'docs/extensions'); import from_code;"
        "print([row for make in from_code.TABLES.values() for row in make()])"
    )
    shown = run(tree, "-c", program)
    for words in (
        "('`newnet`', 'A network of one layer', '', '', '1x4x4', '51', '')",
        "('`newdata`', 'Three classes of grey images, each of one brightness')",
        "('`newopt`', 'the sign of the gradient, with a class of its own', '`Signs`, of our own', '', '')",
        "('`24bit`', '7', '3n', 'The upper three bytes')",
        "Logs of Newtrainer",
    ):
        assert words in shown.stdout, shown.stderr
