"""What this machine gives to Ray: that Ray is here, and the runtime environment of a job. Pure."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dmltrain_launch import LaunchError

AUTO = "auto"  # the cluster that a machine belongs to, as --address
EXTRA = "pip install 'dmltrain[ray]'"


def need_ray(installed: Callable[[str], object] = importlib.util.find_spec) -> None:
    """LaunchError if Ray is missing here."""
    if not installed("ray"):
        raise LaunchError(f"Ray is not installed for {sys.executable}: {EXTRA}", 127)


def runtime_env(given: str) -> dict[str, Any]:
    """The runtime environment in a text of JSON or in a file of YAML or JSON. Ray checks its content."""
    if not given:
        return {}
    import yaml  # --help needs none

    try:
        text = given if given.lstrip().startswith("{") else Path(given).expanduser().read_text()
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--ray-runtime-env {given}: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise LaunchError(f"--ray-runtime-env {given}: neither JSON nor YAML: {error}") from None
    if not isinstance(content, dict):
        raise LaunchError(f'--ray-runtime-env {given}: expected an object, such as {{"pip": ["einops"]}}')
    return content
