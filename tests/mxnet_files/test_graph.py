"""Files with MXNet's graphs: every version is read, and every other file is refused with the reason."""

import json

import pytest

from dmltrain.base.errors import UserError
from dmltrain.mxnet_files import graph
from tests.mxnet_files.graphs import Written

NODES = [{"op": "null", "name": "data", "inputs": []}, {"op": "Flatten", "name": "flat", "inputs": [[0, 0, 0]]}]


def file(nodes=NODES, heads=((1, 0, 0),)):
    return json.dumps({"nodes": nodes, "heads": heads}).encode()


def changed(place, **fields):
    return file([{**each, **(fields if number == place else {})} for number, each in enumerate(NODES)])


@pytest.mark.parametrize("key", ["param", "attr", "attrs"])
def test_options_of_every_version_are_found(key):
    found = graph.parse(Written(key).node("Pooling", "pool", "data", kernel="(2, 2)").content())
    assert found.nodes[0].is_variable and found.heads == (1,) and found.oldest == (key == "param")
    assert found.nodes[1] == graph.Node("Pooling", "pool", {"kernel": "(2, 2)"}, (0,))


def test_a_file_from_before_0_9_has_options_and_attributes_and_no_versions():
    """As MXNet 0.8 wrote it: src/symbol/symbol.cc, with "backward_source_id" and pairs for inputs."""
    old = {"op": "Flatten", "param": {"a": "1"}, "name": "flat", "inputs": [[0, 0]], "attr": {"a": "2", "b": "3"}}
    nodes = [{"op": "null", "param": {}, "name": "data", "inputs": [], "backward_source_id": -1}, old]
    found = graph.parse(file(nodes, heads=[[1, 0]]))
    assert found.oldest and found.nodes[1].options == {"a": "1", "b": "3"} and found.nodes[1].inputs == (0,)


BAD = {
    "no JSON": (b"\x80\x02}q\x00.", "invalid start byte"),
    "cut": (file()[:-3], "Expecting"),
    "a list": (b"[]", "it has no nodes and heads"),
    "no heads": (b'{"nodes": []}', "it has no nodes and heads"),
    "deep": (b"[" * 100_000, "it is nested too deeply"),
    "long number": (b'{"nodes": [' + b"1" * 5000 + b"]}", "Exceeds the limit"),
    "empty": (file([], []), "0 nodes, .* 50000"),
    "too many": (file([0] * 50_001), "50001 nodes, .* 50000"),
    "no head": (file(heads=()), "it has 0 heads"),
    "too many heads": (file(heads=[[1, 0, 0]] * 3), "it has 3 heads"),
    "a number": (file([1]), "node 0 is not an object"),
    "no op": (file([{"name": "a"}]), "node 0 has no op and name"),
    "no name": (changed(1, name=""), "node 1 has no op and name .* 200"),
    "long name": (changed(1, name="a" * 201), "node 1 has no op and name"),
    "inputs": (changed(1, inputs={}), "node 1 'flat': its inputs are not a list"),
    "options": (changed(1, attrs=["a"]), "node 1 'flat': its attrs are not texts"),
    "an option": (changed(1, param={"a": 1}), "node 1 'flat': its param are not texts"),
    "itself": (changed(1, inputs=[[1, 0, 0]]), "node 1 'flat': .*node 1, .* 0 to 0"),
    "below": (changed(1, inputs=[[-1, 0, 0]]), "an input is node -1"),
    "output": (changed(1, inputs=[[0, 1, 0]]), "output 1 of node 0"),
    "triple": (changed(1, inputs=[[0]]), "an input is not .node, output."),
    "texts": (changed(1, inputs=[["0", "0", "0"]]), "an input is not .node, output."),
    "head": (file(heads=[[2, 0, 0]]), "head is node 2, .* 0 to 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_everything_else_is_refused(tmp_path, case):
    content, reason = BAD[case]
    (tmp_path / "m-symbol.json").write_bytes(content)
    with pytest.raises(UserError, match=f"m-symbol.json: .*{reason}.*PREFIX-symbol"):
        graph.read(tmp_path / "m-symbol.json")


def test_a_missing_and_a_huge_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="m-symbol.json: No such file or directory"):
        graph.read(tmp_path / "m-symbol.json")
    with (tmp_path / "m-symbol.json").open("wb") as file:
        file.truncate(graph.MAX_BYTES + 1)
    with pytest.raises(UserError, match="16777217 bytes.* 16777216"):
        graph.read(tmp_path / "m-symbol.json")
