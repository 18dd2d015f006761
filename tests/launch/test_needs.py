"""Which modules a script cannot do without."""

import pytest

from launch.preflight.needs import needs


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch, numpy.linalg as la\nimport os.path", ["torch", "numpy"]),
        ("from dmltrain.report import text\nfrom torch import nn\nimport torch.optim", ["dmltrain", "torch"]),
        ("from __future__ import annotations\nimport __main__", []),
        ("from . import beside\nfrom .common import fit", []),
        ("try:\n    import mxnet\nexcept ImportError:\n    import torch", []),
        ("def main():\n    import torch\nif True:\n    import numpy\nclass A:\n    import yaml", []),
        ("import common\nimport sys\nsys.path.insert(0, '..')\nimport hidden", ["common"]),
        ("import sys\ndef find():\n    sys.path.append('..')\nfind()\nimport hidden", []),
        ("from sys import path\npath.append('..')\nimport hidden", []),
        ("#!/bin/sh\nexec train", []),
        ("import a\0b", []),
        ("", []),
    ],
)
def test_needs_are_what_every_run_imports_first(source, expected):
    assert needs(source) == expected
