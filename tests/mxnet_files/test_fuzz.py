"""Mutated files of MXNet: each is read or refused, in limited memory and time (tests/fuzzing.py)."""

from pathlib import Path

import pytest

from dmltrain.base.errors import UserError
from dmltrain.mxnet_files import graph, rebuild, weights
from tests.fuzzing import Fuzzed, parts, survive


def params_files() -> list[bytes]:
    from tests.mxnet_files.test_params import V1, V2, V3, array, file, oldest

    return [file(array(V2), array(V3), names=(b"arg:a", b"aux:b")), file(array(V1)), file(oldest())]


PARAMS = Fuzzed(
    lambda data: weights.read(Path("m-0001.params"), data),
    params_files,
    (UserError,),
    (b"\xc8\xfa\x93\xf9", b"\xc9\xfa\x93\xf9", b"\xca\xfa\x93\xf9", b"arg:", b"\xff\xff\xff\xff"),
)


def graphs() -> list[bytes]:
    from tests.mxnet_files import made

    return [made.shared().content(), made.windows().content(), made.gluon().content(), made.transformed().content()]


def read_graph(data: bytes) -> None:
    rebuild.rebuild(graph.parse(data), "net", 10, (3, 9, 9))


def as_text(data: bytes) -> bytes:
    """Valid UTF-8: most mutations of a byte end there."""
    return data.decode(errors="ignore").encode()


GRAPH = Fuzzed(
    read_graph,
    graphs,
    (ValueError,),  # NotSupported and ShapeError among them
    (
        *(b'"param"', b'"attr"', b'"Concat"', b'"add_n"', b'"Convolution"', b'"Pooling"', b'"BatchNorm"', b'"relu"'),
        *(b"(2L, 2L)", b"[3,]", b"()", b"True", b"None", b"nan", b"[0, 0, 0]", b"[[", b"{}", b'"__lr_mult__": "-1"'),
    ),
    (bytes, as_text),
)


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("name", ["PARAMS", "GRAPH"])
def test_no_file_of_mxnet_can_break_a_program(name: str, part: int) -> None:
    survive(f"tests.mxnet_files.test_fuzz:{name}", part)
