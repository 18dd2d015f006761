"""A worker without a launcher of ours, as torchrun starts it: python torch_alone.py [WHO IS KILLED, or UNUSED]"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch_backend import sent

import dmltrain.torch.accelerate

os.environ["DMLTRAIN_TRANSPORT"] = "tcp"  # else workers of one host need no server for a sum
if sys.argv[1] == "unused":  # `accelerate launch` takes mpirun on CPUs
    for name in ("RANK", "WORLD_SIZE"):
        os.environ["OMPI_COMM_WORLD_" + name.removeprefix("WORLD_")] = os.environ.pop(name)
dmltrain.torch.accelerate.prepare()
if sys.argv[1] == "unused":
    dist.all_reduce(torch.ones(7))
    dmltrain.torch._process_group.leave()  # as Ray Train's workers do before they are killed
    sys.exit(os.environ["ACCELERATE_USE_CPU"] != "true")
dist.all_reduce(tensor := torch.ones(300_000))
print("sum", tensor[0].item(), sent() > 4 * 300_000, flush=True)
if sys.argv[1] == str(dist.get_rank()):
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(tensor)
dist.destroy_process_group()
