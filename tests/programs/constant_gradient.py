"""A script whose samples all have the gradient 1, so its only weight says how many steps have been made. Arguments: the
kvstore at the start, and the epochs. Each step moves the weight by 1/1024."""

import sys

import torch

import dmltrain

SAMPLES, BATCH, RATE = 240, 4, 1 / 1024

kvstore, epochs = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
optimizer = dmltrain.distribute(model, optimizer, kvstore, update_on_kvstore=kvstore == "dist_sync")
state = dmltrain.State(model=model, optimizer=optimizer)
loader = dmltrain.loader(torch.utils.data.TensorDataset(torch.ones(SAMPLES, 1)), batch_size=BATCH, seed=1)
for _ in state.epochs(epochs):
    for (ones,) in loader:
        optimizer.zero_grad()
        model(ones).mean().backward()
        optimizer.step()
print(f"The weight says {-model.weight.item() / RATE:g} steps", flush=True)
