"""The table in docs/protocol.md of what the scheduler does with each message, made from the table by which it does it.

python -m tests.handlers        # writes it anew
"""

from pathlib import Path

from dmltrain.kvstore.scheduler.core import ALL_ROLES, HANDLERS

PAGE = Path(__file__).parents[1] / "docs/protocol.md"
BEGIN, END = "<!-- made by python -m tests.handlers -->\n", "<!-- end -->\n"


def table() -> str:
    lines = ["| message | from | the scheduler |", "| --- | --- | --- |"]
    for message, handler in HANDLERS.items():
        senders = "any process" if handler.senders == ALL_ROLES else " or ".join(handler.senders)
        jobs = ", elastic jobs only" if handler.only_elastic else ""
        lines.append(f"| `{message.op or message.kind.name}` | {senders}{jobs} | {handler.does} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page with the table of today between the two marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
