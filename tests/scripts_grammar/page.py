"""The page of the documentation that the grammar makes: python -m tests.scripts_grammar.page writes it anew."""

from __future__ import annotations

from pathlib import Path

from tests.scripts_grammar import idioms

PAGE = Path(__file__).parents[2] / "docs/what-a-script-may-do.md"
BEGINNING = """# What a script may do

`dmltrain.distribute(model, optimizer)` works for a script like DistributedDataParallel: when the outermost `backward()`
returns, `p.grad` of each parameter is the mean over all workers, and `step()` is the script's own optimizer.
So everything that a script does between these calls has the same effect as in one process.
This is true for the kvstore `dist_sync` with the optimizer on the workers, which are the defaults.

Workers must do the same things in the same order.
If a script draws random numbers, for example for a mask, they must be equal on all workers.
If a batch of a worker has no loss, the worker may leave out `backward()`; it takes part at its `step()`.
All workers must call `step()` equally often.
"The same as in one process" means one process that has the samples of all workers.

Tests make random programs from these rows and compare them with one process:
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
