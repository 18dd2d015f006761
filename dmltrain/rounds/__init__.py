"""Training in an elastic job, which goes on when workers are lost.

A round of training is one op of the kvstore (kvstore/worker/elastic_store.py), and assignment/deal.py says which samples a
member has in it. What a lost worker had of a round that is not complete comes back. So an epoch uses each sample once.
"""

from dmltrain.rounds.checks import check
from dmltrain.train.elastic import steps, train

__all__ = ["check", "steps", "train"]
