"""The devices of a test in its own process: also a GPU, if torch sees one. test_fake_cuda.py runs these tests where it
does not."""

import torch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
