"""A script of a user with dist_local, whose workers have unequal numbers of batches; each worker prints what it has."""

import hashlib
import json

import torch

import dmltrain
from dmltrain.errors import UserError

rank = dmltrain.rank()  # servers stay in this line
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
inner = torch.optim.Adam(model.parameters(), lr=0.01)
for wrong in ({"kvstore": "dist_sync", "local_steps": 4}, {"kvstore": "dist_local", "local_steps": 0}):
    try:
        dmltrain.distribute(model, inner, **wrong)
        raise SystemExit(f"must be refused: {wrong}")
    except UserError as error:
        print(json.dumps({"error": str(error)}))
optimizer = dmltrain.distribute(model, inner, "dist_local", local_steps=4, outer_lr=0.7, outer_momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def digest() -> str:
    flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


for _ in range(3):
    for _ in range(9 + rank):
        x = torch.randn(16, 5)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        optimizer.reduce_gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    between = digest()
    optimizer.synchronize()
    schedule.step()
    print(json.dumps({"between": between, "after": digest(), "lr": optimizer.param_groups[0]["lr"]}))
