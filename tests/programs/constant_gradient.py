"""A script whose samples all have the gradient 1, so its only weight says how many steps have been made. Arguments: the
kvstore at the start, the epochs, and perhaps a member and what it does. Each step moves the weight by 1/1024.

Worker 2 kills itself in the third step of its second epoch if a member is given. That one is late: it waits until it
knows the next view, and then calls `synchronize` when its first epoch has ended, which must not enter that view, or
`save` when its second one begins. Where changes of the kvstore may be asked for, epochs 1 and 4 begin when there is a
file `go-1`, or `go-4`."""

import os
import signal
import sys
from pathlib import Path

import torch

import dmltrain
from tests.waiting import wait_for

SAMPLES, BATCH, RATE = 240, 4, 1 / 1024


def wait_for_loss(progress):
    wait_for(lambda: progress.pending, "the loss of a member")


kvstore, epochs, *late = sys.argv[1:]
own = os.environ.get("DMLC_TASK_ID")
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
optimizer = dmltrain.distribute(model, optimizer, kvstore, update_on_kvstore=kvstore == "dist_sync")
state = dmltrain.State(model=model, optimizer=optimizer)
loader = dmltrain.loader(torch.utils.data.TensorDataset(torch.ones(SAMPLES, 1)), batch_size=BATCH, seed=1)
for epoch in state.epochs(int(epochs)):
    if "WAITS" in os.environ and epoch in (1, 4):
        wait_for(Path(f"go-{epoch}").exists, f"go-{epoch}")
    if late and late[1] == "save" and epoch == 1:
        if own == late[0]:
            wait_for_loss(optimizer.store.ops._progress)
        state.save("checkpoint.pt")
    for step, (ones,) in enumerate(loader):
        optimizer.zero_grad()
        model(ones).mean().backward()
        if late and own == "2" and (epoch, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    if late == [own, "synchronize"] and epoch == 0:
        wait_for_loss(optimizer.store.ops._progress)
        optimizer.synchronize()
print(f"The weight says {-model.weight.item() / RATE:g} steps", flush=True)
