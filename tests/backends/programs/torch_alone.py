"""A worker without a launcher of ours, as torchrun starts it: python torch_alone.py [WHO IS KILLED]"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch_backend import sent

import dmltrain.torch  # noqa: F401

os.environ["DMLTRAIN_TRANSPORT"] = "tcp"  # else workers of one host need no server for a sum
dist.init_process_group("dmltrain")
dist.all_reduce(tensor := torch.ones(300_000))
print("sum", tensor[0].item(), sent() > 4 * 300_000, flush=True)
if sys.argv[1] == str(dist.get_rank()):
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(tensor)
dist.destroy_process_group()
