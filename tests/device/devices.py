"""The devices of a test in its own process: also a GPU, if torch sees one. tests/device/test_device.py runs these tests
where it does not."""

import torch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
