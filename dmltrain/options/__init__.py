"""The command line of the training programs: the common options of MXNet's scripts, and dmltrain's own.

The fields of `Options` are the only table of options: each field has the type, default, help text and valid values of
one option. There is one file for each group of options. `parse` returns an `Options` or raises UserError; its message
lists the valid values. This package imports no framework and touches no file.
"""

from dmltrain.options.checks import check_loss_scale
from dmltrain.options.field import flag
from dmltrain.options.parser import Parser, gives, parse, parser, usual_top_k
from dmltrain.options.report import PARAMS
from dmltrain.options.table import FLAGS, Options
from dmltrain.options.values import LAST

__all__ = [
    "FLAGS",
    "LAST",
    "PARAMS",
    "Options",
    "Parser",
    "check_loss_scale",
    "flag",
    "gives",
    "parse",
    "parser",
    "usual_top_k",
]
