"""Spatial transformers and clips in PyTorch where the results are known; they are compared with MXNet's elsewhere."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dmltrain.backends.torch import layers as torch_layers  # noqa: E402
from dmltrain.backends.torch.sampling import sample_affine  # noqa: E402
from dmltrain.layers import IDENTITY, Clip, Dense, Flatten, Network, Scale, chain  # noqa: E402

IMAGES = torch.arange(1.0, 41.0).view(2, 1, 4, 5)


def sampled(numbers, target=(4, 5), images=IMAGES):
    return sample_affine(images, torch.tensor([numbers] * len(images)), target)


def test_the_identity_gives_the_image():
    assert torch.allclose(sampled(IDENTITY), IMAGES, atol=1e-5)


def test_the_first_row_is_of_x_and_pixels_outside_are_zeros():
    """A pixel's width is 2 / (5 - 1), its height 2 / (4 - 1)."""
    right = sampled((1.0, 0, 0.5, 0, 1, 0))
    assert torch.allclose(right[..., :-1], IMAGES[..., 1:], atol=1e-4) and (right[..., -1] == 0).all()
    down = sampled((1.0, 0, 0, 0, 1, 2 / 3))
    assert torch.allclose(down[:, :, :-1], IMAGES[:, :, 1:], atol=1e-4) and (down[:, :, -1].abs() < 1e-4).all()


def test_half_a_pixel_beyond_the_edge_is_half_of_the_edge():
    found = sampled((1.0, 0, 0.25, 0, 1, 0))
    assert torch.allclose(found[..., -1], IMAGES[..., -1] / 2, atol=1e-4)


def test_corners_are_centres_of_the_corner_pixels():
    found = sampled(IDENTITY, target=(2, 2))
    assert torch.allclose(found, IMAGES[:, :, ::3, ::4], atol=1e-4)


def test_each_image_has_a_map_of_its_own():
    maps = torch.tensor([IDENTITY, (-1.0, 0, 0, 0, 1, 0)])
    found = sample_affine(IMAGES, maps, (4, 5))
    assert torch.allclose(found, torch.stack([IMAGES[0], IMAGES[1].flip(-1)]), atol=1e-4)


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
