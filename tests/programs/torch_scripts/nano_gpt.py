"""A script of the form of nanoGPT's train.py: a character model, DistributedDataParallel, gradient accumulation."""

import math
import os
from contextlib import nullcontext

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

backend, width, vocabulary, block, steps, gradient_accumulation_steps = "gloo", 512, 32, 16, 3, 4

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % world_size == 0
    gradient_accumulation_steps //= world_size
else:
    ddp_rank, world_size = 0, 1
master_process = ddp_rank == 0
torch.manual_seed(1337 + ddp_rank)
data = torch.randint(0, vocabulary, (10_000,), generator=torch.Generator().manual_seed(0))


def get_batch():
    starts = torch.randint(len(data) - block, (4,))
    x = torch.stack([data[i : i + block] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + block] for i in starts])
    return x, y


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary)
        up, down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.mlp = torch.nn.Sequential(up, torch.nn.GELU(), down)

    def forward(self, x, y):
        h = self.embedding(x)
        logits = self.head(h + self.mlp(h) / math.sqrt(width))
        return F.cross_entropy(logits.view(-1, vocabulary), y.view(-1))


model = DDP(Model()) if ddp else Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(steps):
    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        with nullcontext() if last or not ddp else model.no_sync():
            (model(*get_batch()) / gradient_accumulation_steps).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"iter {step}: norm {norm.item():.6f}")
if ddp:
    destroy_process_group()
