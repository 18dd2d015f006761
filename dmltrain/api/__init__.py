"""State and loader: what a script's own training loop needs to resume, and to be elastic.

`State` has what a checkpoint holds and a new member of an elastic job gets. `Loader` deals out the samples of each
epoch, so that each is used once, and tells the optimizer how much this worker's gradients count.
"""

from dmltrain.api.loader import Loader
from dmltrain.api.state import State

__all__ = ["Loader", "State"]
