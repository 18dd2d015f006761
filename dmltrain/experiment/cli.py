"""The program dmltrain-experiment.

Exit codes: 0 all cells are done; 1 some cells failed; 2 a mistake in the input, or a full disk; 130 interrupted; 141
the reader of the output has closed it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dmltrain.base.errors import UserError
from dmltrain.base.launcher import LAUNCHER, launcher
from dmltrain.base.safe_text import printed, raw
from dmltrain.experiment import answers, command_line, forecast, program, store, text
from dmltrain.experiment import results as tables_and_plots
from dmltrain.experiment.check import Answers, CheckRequest, check, count_gpus
from dmltrain.experiment.command import Where
from dmltrain.experiment.command_line import MOST_CELLS, NAME, RESULTS
from dmltrain.experiment.plan import file
from dmltrain.experiment.plan.cell import Cell, Cells, cells
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.plan.grid import combinations
from dmltrain.experiment.plan.select import chosen
from dmltrain.experiment.program import Program, from_here
from dmltrain.experiment.progress import ExperimentProgress
from dmltrain.experiment.result import DONE, ERROR, Result
from dmltrain.experiment.run import RunContext, Runner, RunReports, to_run
from dmltrain.experiment.store import Store
from dmltrain.report.page import cli as page_program

SHARE = 10  # writing results while cells run takes at most one part in so many of the time


@printed()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    try:
        return _run(command_line.arguments(sys.argv[1:] if argv is None else list(argv)))
    except UserError as error:
        say(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest of the output
        return 141
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def say(line: str) -> None:
    print(f"{NAME}: {line}", file=sys.stderr, flush=True)


# -- one experiment ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What the command line asks for."""

    experiment: Experiment
    program: Program
    cells: Cells
    chosen: Sequence[Cell]
    context: RunContext
    arguments: argparse.Namespace

    @property
    def store(self) -> Store:
        return self.context.store

    def results(self) -> list[Result]:
        return self.store.results(self.experiment, self.cells.all)


def _run(arguments: argparse.Namespace) -> int:
    experiment = file.load(arguments.file, arguments.small, arguments.set)
    tables_and_plots.check(experiment)
    runnable = program.find(experiment)
    # Ask before all cells are computed. With `where` or --only their number is not known yet; _run_cells asks then.
    if not _only_shows(arguments) and not experiment.where and not arguments.only:
        _ask(combinations(experiment), arguments)
    all_cells = cells(experiment, runnable.flags)
    folder = Path(arguments.output) if arguments.output else RESULTS / experiment.name
    context = RunContext(
        experiment,
        Store(Path(from_here(folder))),
        runnable.path,
        launcher(),
        Where(arguments.hostfile, arguments.launcher, tuple(arguments.rest)),
        arguments.at_once,
    )
    work = Work(experiment, runnable, all_cells, chosen(all_cells.all, arguments.only), context, arguments)
    for mode, act in MODES.items():
        if getattr(arguments, mode):
            return act(work)
    return _run_cells(work)


def _only_shows(arguments: argparse.Namespace) -> bool:
    return any(getattr(arguments, mode) for mode in MODES)


def _ask(count: int, arguments: argparse.Namespace) -> None:
    """Ask the user before many cells are run. UserError: the user does not want so many."""
    if count <= MOST_CELLS or arguments.yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(
            f"{arguments.file} has {count} cells: more than {MOST_CELLS} are run with --yes only; "
            "--forecast says how long they take, --only chooses some"
        )
    print(f"{NAME}: {arguments.file} has {count} cells. Run them? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError("nothing was started")
    arguments.yes = True


def _dry_run(work: Work) -> int:
    print(f"{len(work.chosen)} cells of {work.experiment.path}; results in {work.store.folder}")
    if work.cells.merged:
        print(f"{work.cells.merged} combinations have the values of another cell and are left out")
    for number, cell in enumerate(work.chosen, 1):
        words = work.context.command(cell, work.context.words(cell))
        print(f"\n{number}  {cell.id}\n    {shlex.join([LAUNCHER, *words[1:]])}")
    return 0


def _status(work: Work) -> int:
    _say_difference(work)
    ids = {cell.id for cell in work.chosen}
    chosen_results = [result for result in work.results() if result.id in ids]
    print("\n".join([*text.status(chosen_results), text.counts(chosen_results)]))
    return 0


def _say_difference(work: Work) -> None:
    """If the folder has results of another file or another --set, none of the cells is done: say why."""
    difference = work.store.difference(work.experiment, work.cells.all)
    if difference:
        say(f"note: {difference}")


def _forecast(work: Work) -> int:
    _say_difference(work)
    results = work.results()
    open_ = [cell for cell, result in zip(work.cells.all, results, strict=True) if result.status != DONE]
    open_ = [cell for cell in open_ if cell in work.chosen]
    if not open_:
        print("all cells are done")
        return 0
    answered = answers.ask(work.program, [cell.words for cell in open_])
    done = forecast.from_done(work.cells.all, results)
    measurer = forecast.Measurer(work.program, answered)
    estimates = [forecast.estimate(cell, done, answered.get(cell.words, {}), measurer) for cell in open_]
    print("\n".join(text.forecast([cell.id for cell in open_], estimates, work.arguments.at_once)))
    print(
        "A measured step is one of this worker alone on this machine: waiting for other workers, validation and "
        "checkpoints come on top."
    )
    return 0


def _remake(work: Work) -> int:
    if not any(result.status == DONE for result in work.results()):
        _say_difference(work)
        raise UserError(f"{work.store.folder} has no cell that is done: run some first")
    with store.locked(work.store.folder):
        _write(work, work.results(), page=True)
    return 0


def _check(work: Work) -> int:
    _checked(work, work.chosen)
    print(f"{len(work.chosen)} cells: no problem was found")
    return 0


MODES: dict[str, Callable[[Work], int]] = {
    "dry_run": _dry_run,
    "check": _check,
    "status": _status,
    "forecast": _forecast,
    "remake": _remake,
}


# -- running ----------------------------------------------------------------------------------------------------------


def _run_cells(work: Work) -> int:
    with store.locked(work.store.folder):
        if not work.arguments.add:
            work.store.compare(work.experiment, work.cells.all)
        results = work.results()
        status = {result.id: result for result in results}
        todo = to_run(work.chosen, [status[cell.id] for cell in work.chosen], work.arguments.retry)
        _ask(len(todo), work.arguments)
        _announce(work, todo, status)
        if todo:
            _checked(work, todo)
            work.store.write(work.experiment, work.cells.all)
            interrupted = _run_todo(work, todo, status)
        else:
            work.store.write(work.experiment, work.cells.all)
            interrupted = 0
        results = work.results()
        if any(result.status in (DONE, ERROR) for result in results):
            _write(work, results, page=not interrupted)
    ids = {cell.id for cell in work.chosen}
    chosen_results = [result for result in results if result.id in ids]
    print(f"{text.counts(chosen_results)}; results in {work.store.folder}")
    return 130 if interrupted else int(any(result.status != DONE for result in chosen_results))


def _announce(work: Work, todo: Sequence[Cell], results: dict[str, Result]) -> None:
    counts = text.counts([results[cell.id] for cell in work.chosen])
    print(f"{work.experiment.name}: {counts}; {len(todo)} to run", flush=True)
    failed = sum(results[cell.id].status == ERROR for cell in work.chosen)
    if failed and not work.arguments.retry:
        say(f"note: {failed} cells failed earlier: --retry runs them again, --status says why")


def _checked(work: Work, todo: Sequence[Cell]) -> Answers:
    """The program's answers for these cells. UserError lists all problems of the cells."""
    answered = answers.ask(work.program, [cell.words for cell in todo])
    asked = CheckRequest(
        work.experiment,
        work.program,
        work.context.where,
        work.store.folder,
        work.context.plan,
        count_gpus,
        store.free_bytes,
    )
    checked = check(asked, todo, answered)
    for note in checked.notes:
        say(f"note: {note}")
    if checked.problems:
        listed = "".join(f"\n  - {problem}" for problem in checked.problems)
        raise UserError(f"{work.experiment.path}: nothing was started:{listed}")
    return answered


def _run_todo(work: Work, todo: Sequence[Cell], results: dict[str, Result]) -> int:
    """Run cells; returns the signal that interrupted them, or 0."""
    progress = ExperimentProgress(work.cells.all, results, todo, work.arguments.at_once, raw(sys.stdout))
    writer = _Writer(work, time.monotonic)
    runner = Runner(work.context, RunReports(progress.started, progress.ended, writer.write))
    runner.run(todo)
    if runner.interrupted:
        say("interrupted: start it again to go on")
    return runner.interrupted


class _Writer:
    """Writes the tables while cells run, but not for more than a share of the time."""

    def __init__(self, work: Work, clock: Callable[[], float]):
        self.work, self.clock = work, clock
        self.next = 0.0

    def write(self) -> None:
        began = self.clock()
        if began < self.next:
            return
        try:
            _write(self.work, self.work.results(), page=False)
        except store.DiskFull:
            raise
        except UserError:  # the last call of _write reports it; until then the cells run on
            pass
        self.next = self.clock() + SHARE * (self.clock() - began)


def _write(work: Work, results: Sequence[Result], page: bool) -> None:
    """Write the tables and plots. page: also report.html, which its program prints the path of."""
    folder = work.store.folder
    with store.disk(folder):
        notes = tables_and_plots.write(folder, work.experiment, results)
        if page:
            for note in notes:
                say(f"note: {note}")
            page_program.main([str(folder), "-o", str(folder / "report.html")])


if __name__ == "__main__":
    sys.exit(main())
