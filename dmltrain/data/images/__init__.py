"""Images from files to the network's input: decoding, random changes, resampling.

One image at a time, so that threads can share the work; nothing is kept between images.
"""

from dmltrain.data.images.augmentation import ImageAugmentation, augmentation_level
from dmltrain.data.images.decode import BrokenImage
from dmltrain.data.images.samples import evaluation_image, training_image

__all__ = ["BrokenImage", "ImageAugmentation", "augmentation_level", "evaluation_image", "training_image"]
