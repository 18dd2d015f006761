"""Small data files in the real formats, a loopback web server that can misbehave, and the real files if present."""

import gzip
import hashlib
import http.server
import os
import pickle
import struct
import tarfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from dmltrain.data.cifar10_files import BatchFile, Cifar10Files
from dmltrain.data.mnist import IdxFile, MnistFiles
from tests.archives import tar


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


# CIFAR-10, four images a batch


@dataclass
class Cifar:
    files: Cifar10Files
    images: np.ndarray  # of the training batches
    labels: np.ndarray
    binary: dict[str, bytes]  # file name -> contents
    python: dict[str, bytes]
    binary_archive: bytes
    python_archive: bytes

    def write(self, folder: Path, contents: dict[str, bytes]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            (folder / name).write_bytes(data)
        return folder


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """What Python 2's cPickle wrote, protocol 2, as in the original file: {'data': uint8 array, 'labels': list}."""
    rows, size = struct.pack("<i", pixels.shape[0]), struct.pack("<i", pixels.shape[1])
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01J"
        + rows
        + b"J"
        + size
        + b"\x86"
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<I", pixels.size) + pixels.tobytes() + b"tb"
    )
    numbers = b"".join(b"K" + bytes([label]) for label in labels)
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels](" + numbers + b"eu."


def tar_gz(members: Mapping[str, bytes | tarfile.TarInfo]) -> bytes:
    return gzip.compress(tar(members, tarfile.PAX_FORMAT))


@pytest.fixture(scope="session")
def cifar() -> Cifar:
    rng = np.random.default_rng(5)
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    pixels = rng.integers(0, 256, (6, 4, 3072), dtype=np.uint8)
    labels = rng.integers(0, 10, (6, 4))
    binary, python, batches = {}, {}, []
    for name, rows, row_labels in zip(names, pixels, labels, strict=True):
        binary[name + ".bin"] = np.hstack([row_labels[:, None].astype(np.uint8), rows]).tobytes()
        python[name] = python2_pickle(rows, row_labels.tolist())
        batches.append(BatchFile(name, md5(binary[name + ".bin"]), md5(python[name])))
    readme = {"cifar-10-batches-bin/readme.html": b"<html>"}
    binary_archive = tar_gz(readme | {f"cifar-10-batches-bin/{name}": data for name, data in binary.items()})
    # The python archive is not in the order of the batches; that does not matter.
    backwards = sorted(python.items(), reverse=True)
    python_archive = tar_gz({f"cifar-10-batches-py/{name}": data for name, data in backwards})
    files = Cifar10Files(tuple(batches[:5]), batches[5], 4, md5(binary_archive), md5(python_archive))
    images = pixels[:5].reshape(20, 3, 32, 32)
    return Cifar(files, images, labels[:5].reshape(20), binary, python, binary_archive, python_archive)


@pytest.fixture
def evil_pickle(tmp_path) -> tuple[bytes, Path]:
    """A pickle that makes the file, if anything runs it."""
    made = tmp_path / "attacked"

    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {made}",)

    return pickle.dumps({b"data": Attack(), b"labels": []}, protocol=2), made


# MNIST, a few images


@dataclass
class Mnist:
    files: MnistFiles
    contents: dict[str, bytes]  # file name -> idx, unpacked
    zipped: dict[str, bytes]


@pytest.fixture(scope="session")
def mnist_files() -> Mnist:
    rng = np.random.default_rng(6)
    contents, zipped, files = {}, {}, []
    for prefix, count in (("train", 12), ("t10k", 5)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            name = f"{prefix}-{kind}-ubyte"
            data = rng.integers(0, 10, shape, dtype=np.uint8)
            contents[name] = struct.pack(f">{1 + data.ndim}I", 0x0800 + data.ndim, *shape) + data.tobytes()
            zipped[name + ".gz"] = gzip.compress(contents[name])
            files.append(IdxFile(name, shape, md5(contents[name]), md5(zipped[name + ".gz"])))
    return Mnist(MnistFiles(*files), contents, zipped)


# A web server on loopback


@dataclass
class Web:
    """`files`: path -> body. `announce`: path -> Content-Length to claim. `hold`: bodies wait for it, if given, after
    half of their bytes."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    announce: dict[str, int | None] = field(default_factory=dict)
    hold: threading.Event | None = None
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802  # the base class's name
            site.requests.append(self.path)
            body = site.files.get(self.path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            length = site.announce.get(self.path, len(body))
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()
            self._send(body)

        def _send(self, body):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if site.hold:
                site.hold.wait(120)
            try:
                self.wfile.write(body[len(body) // 2 :])
            except OSError:
                return  # the client went away, as the tests want

        def log_message(self, *arguments):
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site = Web(f"http://127.0.0.1:{server.server_port}/")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield site
    if site.hold:
        site.hold.set()
    server.shutdown()
    server.server_close()
    thread.join()
