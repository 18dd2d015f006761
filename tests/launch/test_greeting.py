"""Waiting for an agent behind SSH ends with its greeting or with one sentence that explains the failure."""

import math

import pytest

from launch.agent.protocol import GREETING
from launch.channels import NOISE_BYTES
from launch.channels.ssh.greeting import NoAgent, await_agent, explain, label, timed_out
from launch.job.host import Host

HOST = Host("h1", where="hosts:3")


class Script:
    """A channel that delivers these chunks; then it ends, or stays silent."""

    def __init__(self, *pieces: bytes, ends: bool = True, err: tuple[str, ...] = ()):
        self.pieces, self.ends, self.err, self.closed, self.timeouts = list(pieces), ends, list(err), False, []

    @property
    def exit_code(self) -> int | None:
        return 3 if self.closed else None

    def read(self, timeout: float) -> bytes:
        self.timeouts.append(timeout)
        if not self.pieces and not self.ends:
            raise TimeoutError
        return self.pieces.pop(0) if self.pieces else b""

    def close(self) -> str:
        self.closed = True
        return "exited with 3"

    def stderr_lines(self) -> list[str]:
        return self.err


def test_what_a_login_script_prints_comes_before_the_greeting():
    for pieces in ([b"Welcome!\n" + GREETING + b"2\n"], [b"Welcome!\n", GREETING[:4], GREETING[4:] + b"2\n"]):
        channel = Script(*pieces, b"more")
        assert await_agent(channel, math.inf) == b"Welcome!\n" + GREETING + b"2\n"
        assert not channel.closed and channel.pieces == [b"more"]


def test_a_channel_that_ends_without_an_agent_is_closed_and_says_how():
    channel = Script(b" no \xff python\n", err=("sh: not found",))
    with pytest.raises(NoAgent) as caught:
        await_agent(channel, math.inf)
    found = caught.value
    assert (found.how, found.code, found.out, found.err) == ("exited with 3", 3, "no \ufffd python", ["sh: not found"])


def test_noise_without_end_is_no_agent():
    channel = Script(*[b"y\n" * 4096] * 100, ends=False)
    with pytest.raises(NoAgent):
        await_agent(channel, math.inf)
    assert channel.closed and len(channel.pieces) == 100 - NOISE_BYTES // 8192 - 2, "a read more than is allowed"


def test_silence_ends_at_the_deadline_with_the_channel_closed():
    channel = Script(b"Welcome!\n", ends=False)
    with pytest.raises(TimeoutError):
        await_agent(channel, 0.0)
    assert channel.closed and channel.timeouts == [0.01, 0.01], "it has passed, and a wait is never without limit"


@pytest.mark.parametrize(
    ("code", "err", "python", "words", "exit_code"),
    [
        (1, ["too old a Python: 3.6"], "", "python3 there is Python 3.6, too old: install Python 3.8", 2),
        (1, ["Unknown option: -I", "usage: python"], "/py", "/py there is Python 2, too old: install Python 3.8", 2),
        (127, ["x", "sh: 1: p: not found"], "", "python3 was not found there (sh: 1: p: not found)", 2),
        (127, [], "/opt/py", "/opt/py was not found there: install", 2),
        (126, ["sh: /py: No"], "/py", "/py there cannot be executed (sh: /py: No)", 2),
        (1, ["x"], "", "exited with 1; the output was: some words; does ssh n1 true", 125),
        (None, [], "", "exited with None; the output was: some words; does ssh n1 true", 125),
    ],
)
def test_each_failure_is_explained(code, err, python, words, exit_code):
    host = Host("h1", hostname="n1", python=python, where="hosts:3")
    error = explain(NoAgent(f"exited with {code}", code, "some words", err), host)
    assert str(error).startswith("h1 (hosts:3): ") and words in str(error)
    assert error.code == exit_code


def test_the_error_shows_the_end_of_the_output_if_there_is_any():
    said = str(explain(NoAgent("exited with 1", 1, "x" * 1000 + "y", []), HOST))
    assert f"the output was: {'x' * 499}y; does" in said
    assert "output" not in str(explain(NoAgent("exited with 1", 1, "", []), HOST))


def test_messages_name_a_host_with_its_line():
    assert (label(HOST), label(Host("h2"))) == ("h1 (hosts:3)", "h2")
    error = timed_out(HOST, 2.5)
    assert str(error).startswith("h1 (hosts:3): the agent did not start within 2.5 s: ") and error.code == 125
