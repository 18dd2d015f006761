"""Files of optimizer states: whole, or an error that names the file and what is missing."""

import os
from types import SimpleNamespace

import pytest

from dmltrain.errors import UserError
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.state_file import read_state, write_whole


def test_a_state_is_read_as_it_was_written_and_named_if_that_cannot_be(tmp_path):
    path = tmp_path / "m.server-0"
    for state in (b"old", bytearray(b"new"), memoryview(b"newer")):
        write_whole(path, state)
        assert read_state(str(path)) == state
    assert os.listdir(tmp_path) == ["m.server-0"]
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="m.server-0: Is a directory; .* not saved"):
        write_whole(path, b"state")
    assert os.listdir(tmp_path) == ["m.server-0"]
    with pytest.raises(UserError, match="m.server-1: No such file or directory"):
        read_state(str(tmp_path / "m.server-1"))


def test_states_of_servers_are_one_file_each_and_all_are_needed(tmp_path):
    loaded = []
    path = str(tmp_path / "states")
    for states in ([b"a", b"b", b"c"], [b"d", b"e"]):
        KVStore.save_optimizer_states(SimpleNamespace(optimizer_states=lambda states=states: states), path)
        KVStore.load_optimizer_states(SimpleNamespace(load_optimizer_state_bytes=loaded.append), path)
    assert loaded == [[b"a", b"b", b"c"], [b"d", b"e"]]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["states.server-0", "states.server-1"]
    with pytest.raises(UserError, match=r"missing.server-0: No such file.*one file for each server"):
        KVStore.load_optimizer_states(SimpleNamespace(load_optimizer_state_bytes=list), str(tmp_path / "missing"))
