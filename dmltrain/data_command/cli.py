"""The program dmltrain-data.

Exit codes: 0 success; 1 `verify` found records that cannot be used; 2 a mistake in the input; 130 interrupted; 141 the
reader of the output has closed it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from dmltrain.base.errors import UserError
from dmltrain.base.safe_text import printed
from dmltrain.data_command import index, pack, partition, show, speed, verify
from dmltrain.data_command.say import say
from dmltrain.options import Parser

# Each module has HELP and EXAMPLES (texts), add_arguments(parser) and run(arguments) -> exit code.
# With TRAINING_OPTIONS it also gets the words that are none of its own arguments, in arguments.rest.
VERBS: dict[str, ModuleType] = {
    "pack": pack,
    "index": index,
    "verify": verify,
    "partition": partition,
    "show": show,
    "speed": speed,
}


@printed()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except UserError as error:
        say(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest of the output
        return 141
    except OSError as error:
        say(f"error: {error.filename or 'a file'}: {error.strerror or error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _run(words: Sequence[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0
    if not words or words[0] not in VERBS:
        problem = f"unknown verb {words[0]!r}" if words else "no verb is given"
        raise UserError(f"{problem}: expected one of {', '.join(VERBS)}; see dmltrain-data --help")
    verb = VERBS[words[0]]
    of_verb = parser(words[0])
    arguments, rest = of_verb.parse_known_args(pack.old_values(words[1:]))
    arguments.rest = rest
    if rest and not getattr(verb, "TRAINING_OPTIONS", False):
        of_verb.error(f"unrecognized arguments: {' '.join(rest)}")
    code: int = verb.run(arguments)
    return code


def usage() -> str:
    rows = "".join(f"  {name:<11} {verb.HELP}\n" for name, verb in VERBS.items())
    return (
        "usage: dmltrain-data VERB [options] ...\n\nPacks, checks, divides and shows data sets of images.\n\n"
        f"verbs:\n{rows}\ndmltrain-data VERB --help prints the options of a verb.\n"
    )


def parser(name: str) -> Parser:
    """The parser of a verb's arguments."""
    verb = VERBS[name]
    parser_of_all = Parser(
        prog=f"dmltrain-data {name}",
        description=verb.HELP[0].upper() + verb.HELP[1:] + ".",
        epilog=verb.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_arguments(parser_of_all)
    return parser_of_all


if __name__ == "__main__":
    sys.exit(main())
