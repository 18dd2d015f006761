"""Downloads from a real server: success, failures, and several processes at once."""

import hashlib
import importlib.util
import os
import pty
import signal
import socket
import subprocess
import sys
import threading

import pytest

from dmltrain.base.errors import UserError
from dmltrain.data.download import Remote, fetch
from tests.readable import readable
from tests.waiting import wait_for

BODY = os.urandom(300_000)
MD5 = hashlib.md5(BODY).hexdigest()


@pytest.fixture
def remote(web):
    web.files["/file.gz"] = BODY
    return Remote(web.url + "file.gz", MD5)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fetching(remote, folder, **options):
    """Another process that fetches."""
    program = (
        "import sys; from dmltrain.data.download import Remote, fetch; from pathlib import Path\n"
        "fetch(Remote(sys.argv[1], sys.argv[2]), Path(sys.argv[3]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, remote.url, remote.md5, str(folder)],
        **({"stderr": subprocess.PIPE, "text": True} | options),
    )


def test_a_download_leaves_only_the_file_also_without_content_length(remote, tmp_path, web):
    path = fetch(remote, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "file.gz" and path.read_bytes() == BODY
    assert names(path.parent) == ["file.gz"]
    assert fetch(remote, path.parent) == path
    assert web.requests == ["/file.gz"]
    web.announce["/file.gz"] = None
    assert fetch(remote, tmp_path).read_bytes() == BODY


def refused(remote, folder, reason, **options):
    """The fetch fails for that reason, says what to do, and leaves nothing."""
    with pytest.raises(UserError, match=reason) as caught:
        fetch(remote, folder, **options)
    for essential in ("file.gz", remote.url, f"put file.gz (md5 {MD5}) into {folder}"):
        assert essential in str(caught.value)
    assert names(folder) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda web: web.files.update({"/file.gz": b"login"}), f"{hashlib.md5(b'login').hexdigest()}, expected {MD5}"),
        (lambda web: web.announce.update({"/file.gz": len(BODY) + 5}), f"after {len(BODY)} of {len(BODY) + 5} bytes"),
        (lambda web: web.files.clear(), "HTTP status 404"),
    ],
    ids=["other content", "an end that is missing", "no file"],
)
def test_a_download_that_fails(remote, tmp_path, web, change, reason):
    change(web)
    refused(remote, tmp_path, reason)


def test_no_connection_and_no_folder(tmp_path, remote):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and does not listen
        refused(Remote(f"http://127.0.0.1:{free.getsockname()[1]}/file.gz", MD5), tmp_path, "Connection refused")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="put file.gz"):
        fetch(remote, tmp_path / "file" / "folder")


def test_a_server_that_never_answers_or_stops_in_the_middle(remote, tmp_path, web):
    web.hold = threading.Event()
    refused(remote, tmp_path, "timed out", timeout=0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refused(Remote(f"http://127.0.0.1:{silent.getsockname()[1]}/file.gz", MD5), tmp_path, "timed out", timeout=0.1)


def test_a_server_that_does_not_speak_http(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        refused(Remote(f"http://127.0.0.1:{server.getsockname()[1]}/file.gz", MD5), tmp_path, "SSH-2.0")
        thread.join()


def test_two_processes_download_once(remote, tmp_path, web):
    web.hold = threading.Event()
    first, second = fetching(remote, tmp_path), fetching(remote, tmp_path)
    waiting = readable([first.stderr, second.stderr], 120)
    assert waiting, "neither process said that it waits"
    assert waiting[0].readline() == "waiting for another process that downloads file.gz\n"
    web.hold.set()
    assert (first.wait(), second.wait()) == (0, 0)
    first.stderr.close()
    second.stderr.close()
    assert web.requests == ["/file.gz"]
    assert names(tmp_path) == ["file.gz"] and (tmp_path / "file.gz").read_bytes() == BODY


def test_a_killed_download_leaves_no_file_and_no_lock(remote, tmp_path, web):
    web.hold = threading.Event()
    process = fetching(remote, tmp_path)
    wait_for(lambda: web.requests and ".file.gz.part" in names(tmp_path), "it downloads")
    process.kill()
    process.wait()
    process.stderr.close()
    assert "file.gz" not in names(tmp_path) and ".file.gz.part" in names(tmp_path)
    web.hold.set()
    assert fetch(remote, tmp_path).read_bytes() == BODY
    assert names(tmp_path) == ["file.gz"]


def test_a_frozen_download_of_another_process_is_named(remote, tmp_path, web):
    web.hold = threading.Event()
    process = fetching(remote, tmp_path)
    wait_for(lambda: ".file.gz.part" in names(tmp_path), "it downloads")
    process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(UserError, match=r"another process, .*\.file\.gz\.lock.* has made no progress for 0.3 s"):
            fetch(remote, tmp_path, stall=0.3)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_progress_without_a_terminal_is_a_line_a_tenth(remote, tmp_path, web, capfd):
    web.files["/file.gz"] = body = bytes(5 << 20)
    fetch(Remote(remote.url, hashlib.md5(body).hexdigest()), tmp_path)
    lines = capfd.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 10
    assert all(line.startswith("downloading file.gz: ") and line.endswith(" MB/s") for line in lines)
    assert lines[-1].startswith("downloading file.gz: 5.2 of 5.2 MB")


@pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="rich is not installed")
def test_progress_on_a_terminal_is_a_bar(remote, tmp_path):
    ours, theirs = pty.openpty()
    process = fetching(remote, tmp_path, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other end is closed: the process has ended
            break
    os.close(ours)
    assert process.wait() == 0
    assert b"file.gz" in shown and b"\x1b[" in shown and b"300.0/300.0 kB" in shown
