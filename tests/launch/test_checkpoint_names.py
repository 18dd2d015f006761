"""The launcher knows the files that dmltrain saves by their names, because neither imports the other."""

import os
from types import SimpleNamespace

from dmltrain.checkpoints import checkpoint
from dmltrain.kvstore.base import KVStore
from dmltrain_launch.agent.copy.compare import CHECKPOINT


def test_all_that_dmltrain_saves_has_a_checkpoints_name_but_code_and_settings_have_none(tmp_path):
    names = [checkpoint.path("run/r8", 12345, suffix).name for suffix in checkpoint.SUFFIXES]
    KVStore.save_optimizer_states(SimpleNamespace(optimizer_states=lambda: [b"state"]), str(tmp_path / "states"))
    names += ["r8-symbol.json", *os.listdir(tmp_path)]  # the first is MXNet's, beside its .params
    assert len(names) == len(checkpoint.SUFFIXES) + 2
    assert all(CHECKPOINT.fullmatch(os.fsencode(name)) for name in names), names
    for name in (b"train.py", b"config.json", b"pt", b"net.pt.py", b"server-0", b"symbol.json", b"params"):
        assert not CHECKPOINT.fullmatch(name), name
