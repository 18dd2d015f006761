"""Fills pages of the site from elsewhere in the repository, so that nothing is written twice.

    ```{program-output} dmltrain-launch --help     what a program prints; the build fails when the program does
    ```
    ```{code-table} networks                       the rows of a table in the code; TABLES has their names
    ```

PAGES are files of the repository's root: their links are rewritten so that they lead to pages of the site.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from dmltrain import data, models, optimizers
from dmltrain.data import readers
from dmltrain.data.images import ImageAugmentation
from dmltrain.kvstore import codec, types
from dmltrain.mxnet_files.operators import OPERATORS, One
from dmltrain.optimizers import schedule
from dmltrain.options import Options, flag, mxnet
from dmltrain.report import dialect
from dmltrain.report.summaries import summary
from dmltrain_launch.clusters import LAUNCHERS
from dmltrain_launch.command_line import old_options

REPOSITORY = Path(__file__).parents[2]
WIDTH = 100  # columns of a program's output
PAGES = {"contributing": "CONTRIBUTING.md", "changes": "CHANGELOG.md"}
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")  # a relative one


class ProgramOutput(SphinxDirective):
    """The standard output of a command of this project, run in the repository."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the program may have changed
        program, *arguments = self.arguments[0].split()
        return [nodes.literal_block(text=_output([_found(program), *arguments]), language="text")]


def _found(program: str) -> str:
    """`python` is this Python; programs are those that the set-up installed beside it."""
    return sys.executable if program == "python" else str(Path(sys.executable).parent / program)


def _output(command: list[str]) -> str:
    environment = {**os.environ, "COLUMNS": str(WIDTH), "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True).stdout


Rows = Iterable[tuple[str, ...]]


def _kvstores() -> Rows:
    yield "`--kv-store`", "other names", "meaning", "staleness", "the optimizer runs on"
    for row in types.TABLE:
        yield f"`{row.name}`", _code(row.aliases), row.summary, _staleness(row), " or ".join(row.optimizer_on)


def _staleness(row: types.KVStoreType) -> str:
    if row.takes_staleness:
        return "`--staleness`"
    if row.steps_alone:
        return "`--local-steps`"
    return "any" if row.staleness else "0"


def _codecs() -> Rows:
    yield "`--gc-type`", "number in frames", "bytes of n values", "what travels"
    yield "`none`", "0", "4n", "float32 values as they are"
    for row in codec.TABLE:
        yield f"`{row.name}`", str(row.number), row.size, _sentence(row.__doc__)


def _optimizers() -> Rows:
    yield "`--optimizer`", "what it is", "class", "arguments with `--mom 0.9`", "a server needs"
    for row in optimizers.TABLE:
        if row.torch:
            about = _sentence(importlib.import_module(f"{optimizers.__name__}.{row.name}").__doc__)
            arguments = _code(f"{key}={value}" for key, value in row.torch.arguments(Options()).items())
            kind = f"`{row.torch.name}`, of our own" if row.torch.own else f"`torch.optim.{row.torch.name}`"
            pulled = "each worker's last pull" if row.torch.needs_pulled else ""
            yield f"`{row.name}`", about.partition(": ")[2], kind, arguments, pulled or _whole(row.torch)


def _whole(row: optimizers.Torch) -> str:
    return "" if row.elementwise else "whole weights"


def _networks() -> Rows:
    yield "`--network`", "what it is", "`--num-layers`", "its own options", "usual images", "parameters", "sources"
    for name, row in models.NETWORKS.items():
        usual = models.create(name, None, row.num_classes, row.image_shape)
        own = _code(flag(option) for option in row.options)
        size, parameters = "x".join(map(str, row.image_shape)), f"{usual.num_parameters:,}"
        yield f"`{name}`", _about(row), row.depths, own, size, parameters, _sources(row)


def _augmentation() -> Rows:
    yield "field", "`ImageRecordIter`", "default", "meaning"
    for row in dataclasses.fields(ImageAugmentation):
        yield (
            f"`{row.name}`",
            _code(filter(None, [row.metadata["mxnet"]])),
            f"`{row.default}`",
            row.metadata["about"],
        )


def _policies() -> Rows:
    yield "`--lr-policy`", "the learning rate is `--lr` times", "needs"
    for name, row in schedule.POLICIES.items():
        marks = ["lr_step_epochs or lr_step_iterations"] if row.marked else []
        needs = ", ".join(f"`{flag(each)}`" for name in (*marks, *row.needs) for each in name.split(" or "))
        yield f"`{name}`", row.formula, needs


def _mxnet_options() -> Rows:
    yield "option", "of", "here"
    for name, program, text in mxnet.rows():
        yield f"`{name}`", program, text.replace("|", "\\|")


def _old_options() -> Rows:
    yield "option", "here"
    for name, text in old_options.rows():
        yield f"`{name}`", text.replace("|", "\\|")


def _graphs() -> Rows:
    """Operators that are other names of the same share a row."""
    yield ("operators of MXNet's graphs",)
    made = {name: row.layer if isinstance(row, One) else row.join for name, row in OPERATORS.items()}
    for function in dict.fromkeys(made.values()):
        yield (_code(name for name, each in made.items() if each is function),)


TABLES: dict[str, Callable[[], Rows]] = {
    "kvstores": _kvstores,
    "codecs": _codecs,
    "optimizers": _optimizers,
    "networks": _networks,
    "augmentation": _augmentation,
    "graphs": _graphs,
    "datasets": lambda: [("`--dataset`", "what it is"), *_described(data.DATASETS)],
    "formats": lambda: [("files", "what is read"), *((row.name, _about(row.open)) for row in readers.FORMATS)],
    "policies": _policies,
    "mxnet-options": _mxnet_options,
    "old-options": _old_options,
    "launchers": lambda: [
        ("`--launcher`", "where the job runs"),
        *((f"`{name}`", row.meaning) for name, row in LAUNCHERS.items()),
    ],
    "columns": lambda: [
        ("`--format csv`", "heading", "unit"),
        *((f"`{row.name}`", row.heading, row.unit) for row in summary.COLUMNS.values()),
    ],
    "dialects": lambda: [("logs",), *((_about(row),) for row in dialect.DIALECTS)],
}


class CodeTable(SphinxDirective):
    """A table of the code as a table of the page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the table may have changed
        head, *rows = TABLES[self.arguments[0]]()
        lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]
        parent = nodes.Element()
        self.state.nested_parse(StringList(lines, self.get_source_info()[0]), self.content_offset, parent)
        return parent.children


def _described(table: dict[str, Any]) -> Rows:
    return ((f"`{name}`", _about(row)) for name, row in table.items())


def _about(row: Any) -> str:
    """What the row's module says first; no sources."""
    return re.split(r",? \(|, after ", _sentence(_module(row).__doc__))[0]


def _module(row: Any) -> Any:
    """The module in which a row is defined, or the function or class that it holds."""
    held = (row, *getattr(row, "__dict__", {}).values())
    return inspect.getmodule(next(each for each in held if inspect.isroutine(each) or inspect.isclass(each)))


def _sources(row: Any) -> str:
    """The file that the module's first sentence has in parentheses, and the paper that it names behind "after"."""
    words = _sentence(_module(row).__doc__)
    found = re.search(r"\(([^()]+/[^()]+)\)", words), re.search(r", after (.*)", words)
    return "; ".join(each[1] for each in found if each)


def _sentence(text: str | None) -> str:
    """The first one, without its full stop."""
    words = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", words)[0].rstrip(".")


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _take_root_file(app: Sphinx, page: str, source: list[str]) -> None:
    """On source-read: the text of a page in PAGES is that of its file."""
    if page in PAGES:
        file = REPOSITORY / PAGES[page]
        app.env.note_dependency(str(file))
        source[0] = LINK.sub(lambda link: f"]({_from_docs(link[1])})", file.read_text(encoding="utf-8"))


def _from_docs(target: str) -> str:
    """'docs/mxnet.md' -> 'mxnet.md', 'CHANGELOG.md' -> 'changes.md', 'setup.py' -> '../setup.py'."""
    page = next((page for page, file in PAGES.items() if target == file), "")
    return f"{page}.md" if page else target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("program-output", ProgramOutput)
    app.add_directive("code-table", CodeTable)
    app.connect("source-read", _take_root_file)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
