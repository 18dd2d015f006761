"""A script over gloo: gloo_alone.py SCRIPT [ARGUMENT ...]. Its group stays: the end of one may wait for ever in torch,
for a thread that wants the GIL (dmltrain/backends/torch/process_group/group.py)."""

import runpy
import sys

import torch.distributed as dist

dist.destroy_process_group = lambda: None
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
