"""Spatial transformers and clips in PyTorch where the results are known; they are compared with MXNet's elsewhere."""

import pytest
import torch

from dmltrain.backends.torch import layers as torch_layers
from dmltrain.backends.torch.sampling import sample_affine
from dmltrain.layers import IDENTITY, Clip, Dense, Flatten, Network, Scale, chain

IMAGES = torch.arange(1.0, 41.0).view(2, 1, 4, 5)


def shifted(images, dimension, start):
    """The images moved by one pixel or half of one; zeros come from outside."""
    return torch.cat([images, torch.zeros_like(images)], dimension).narrow(dimension, start, images.shape[dimension])


FLIPPED = (-1.0, 0, 0, 0, 1, 0)


@pytest.mark.parametrize(
    ("maps", "target", "expected"),
    [
        ([IDENTITY, IDENTITY], (4, 5), IMAGES),
        ([(1.0, 0, 0.5, 0, 1, 0)] * 2, (4, 5), shifted(IMAGES, 3, 1)),  # the first row is of x
        ([(1.0, 0, 0, 0, 1, 2 / 3)] * 2, (4, 5), shifted(IMAGES, 2, 1)),
        ([(1.0, 0, 0.25, 0, 1, 0)] * 2, (4, 5), (IMAGES + shifted(IMAGES, 3, 1)) / 2),  # half a pixel
        ([IDENTITY, IDENTITY], (2, 2), IMAGES[:, :, ::3, ::4]),  # corners are centres of the corner pixels
        ([IDENTITY, FLIPPED], (4, 5), torch.stack([IMAGES[0], IMAGES[1].flip(-1)])),  # each has a map of its own
    ],
)
def test_pixels_are_where_the_map_says_and_those_outside_are_zeros(maps, target, expected):
    """A pixel's width is 2 / (5 - 1), its height 2 / (4 - 1)."""
    assert torch.allclose(sample_affine(IMAGES, torch.tensor(maps), target), expected, atol=1e-4)


def test_half_types_do_not_move_the_places():
    """bfloat16 cannot even tell the columns of 300 pixels apart."""
    images = torch.arange(300.0).remainder(7).view(1, 1, 1, 300).expand(1, 1, 2, 300).to(torch.bfloat16)
    found = sample_affine(images, torch.tensor([IDENTITY], dtype=torch.bfloat16), (2, 300))
    assert found.dtype == torch.bfloat16 and torch.allclose(found, images, atol=1e-3)


def test_a_clips_gradient_passes_at_its_bounds():
    network = Network("n", chain(Clip(low=0.0, high=6.0), Flatten(), Dense("fc", 1, bias=False)), (1, 1, 5), 1)
    module = torch_layers.build(network)
    torch.nn.init.ones_(module.fc_weight)
    images = torch.tensor([-1.0, 0, 3, 6, 7]).view(1, 1, 1, 5).requires_grad_()
    logits = module(images)
    logits.backward()
    assert logits.item() == 15 and images.grad.flatten().tolist() == [0, 1, 1, 1, 0]


def test_scaling_never_overwrites_the_images():
    network = Network("n", chain(Scale(factor=3.0), Scale(factor=2.0), Flatten(), Dense("fc", 1)), (1, 4, 5), 1)
    module = torch_layers.build(network)
    torch.nn.init.ones_(module.fc_weight)
    images = IMAGES.clone()
    assert module(images).flatten().tolist() == (6 * IMAGES.flatten(1).sum(1)).tolist()
    assert torch.equal(images, IMAGES)
