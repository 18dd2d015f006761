"""A script of one's own whose weight moves by the learning rate in each step, because all gradients are 1. It prints by
how much. Arguments: the kind of batch of each worker; the step in which worker 1 is killed (kill -9), 0: never; and if
it is given, the file for which worker 0 waits in its second step.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import dmltrain
from tests.waiting import wait_for

SAMPLES, RATE = 96, 0.5
kinds, killed = sys.argv[1].split(","), int(sys.argv[2])
model = torch.nn.Linear(1, 1, bias=False)
rank = dmltrain.rank()
optimizer = dmltrain.distribute(model, torch.optim.SGD(model.parameters(), lr=RATE), batch=kinds[rank % len(kinds)])
state = dmltrain.State(model=model, optimizer=optimizer)
loader = dmltrain.loader(torch.ones(SAMPLES, 1), batch_size=4)
moves = []
for _ in state.epochs(1):
    for step, ones in enumerate(loader, 1):
        if rank == 1 and step == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and step == 2 and sys.argv[3:]:
            wait_for(Path(sys.argv[3]).exists, sys.argv[3])
        before = float(model.weight.detach())
        optimizer.zero_grad()
        model(ones).mean().backward()
        optimizer.step()
        assert [group["lr"] for group in optimizer.param_groups] == [RATE]
        moves.append(f"{(before - float(model.weight.detach())) / RATE:.3f}")
print("Moves:", *moves, flush=True)
print(f"Final weights sha256={state.digest()}", flush=True)
