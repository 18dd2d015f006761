"""`refusal`: what a user is told who gives something wrong."""

from collections.abc import Callable

import pytest

from dmltrain_launch import LaunchError


def refusal(function: Callable[..., object], *arguments: object, **named: object) -> str:
    with pytest.raises(LaunchError) as caught:
        function(*arguments, **named)
    assert caught.value.code == 2
    return str(caught.value)
