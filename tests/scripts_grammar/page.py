"""The page of the documentation that the grammar makes: python -m tests.scripts_grammar.page writes it anew."""

from __future__ import annotations

from pathlib import Path

from tests.scripts_grammar import idioms

PAGE = Path(__file__).parents[2] / "docs/what-a-script-may-do.md"
BEGINNING = """# What a script may do

`dmltrain.distribute(model, optimizer)` gives a script the meaning that it has with DistributedDataParallel: when the
outermost `backward()` returns, `p.grad` of each parameter is the mean over all workers, and `step()` is the script's
own optimizer. So what a script does between these calls has the effect that it has in one process.
This is so with the kvstore `dist_sync` and the optimizer on the workers, which are the default.

Workers must do the same things in the same order: what a script draws at random, such as a mask, it must draw equally
on all. A worker whose batch has no loss may leave out `backward()`; it takes part at its `step()`, which all workers
call equally often. "The same as in one process" is one that has the samples of all workers.

Tests make random programs out of these rows and compare them with one process:
`python -m tests.scripts_grammar.run --seeds 0 1000`.
"""
TITLES = {
    "The loop": idioms.STYLES,
    "Losses": idioms.LOSSES,
    "Backward": idioms.BACKWARDS,
    "Zeros": idioms.ZEROS,
    "Gradients between backward and step": idioms.GRADIENTS,
    "Steps, and what comes after them": idioms.STEPS,
    "Options of the optimizer": idioms.OPTIONS,
    "Freezing, phases, checkpoints and hooks": idioms.PHASES,
}
REFUSED = [
    "- workers that call `backward()`, `zero_grad()` and `step()` unequally often, where that mixes up batches",
    "- workers that replace `p.grad` by gradients of their own after `backward()`",
    "- an optimizer that has parameters of another model",
    "- compression, and a gradient that would be sent a second time (`backward()` without `zero_grad()`)",
]


def page() -> str:
    lines = [BEGINNING.rstrip()]
    for title, rows in TITLES.items():
        lines += ["", f"## {title}", "", "| what a script does | what happens |", "| --- | --- |"]
        lines += [f"| {row.does} | {row.happens} |" for row in rows]
    refused = [row.does for rows in TITLES.values() for row in rows if row.happens.startswith("refused")]
    lines += ["", "## What is refused", "", "These scripts end with an error that names the fix, on all workers:", ""]
    return "\n".join([*lines, *(f"- a script that {each}" for each in refused), *REFUSED]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
