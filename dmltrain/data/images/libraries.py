"""The libraries that decode and resample images, imported when the first image needs them.

They are an extra of the package, so that training on CIFAR-10 or MNIST needs none of them.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from dmltrain.base.errors import UserError


@cache
def library(name: str) -> Any:
    """The module `name`: cv2, simplejpeg or PIL.Image. UserError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"images need the Python module {name.partition('.')[0]}, which cannot be imported ({error}): "
            "pip install 'dmltrain[images]'"
        ) from error
