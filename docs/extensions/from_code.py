"""Fills pages of the site from elsewhere in the repository, so that nothing is written twice.

    ```{program-output} dmltrain-launch --help     what a program prints; the build fails when the program does
    ```

PAGES are files of the repository's root: their links are rewritten so that they lead to pages of the site.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

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
    app.connect("source-read", _take_root_file)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
