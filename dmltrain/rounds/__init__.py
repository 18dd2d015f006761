"""The rounds of an epoch: those of a plain job, and those of an elastic one, which goes on when workers are lost.

In an elastic job a round of training is one op of the kvstore (kvstore/worker/elastic_ops.py), and
data/assignment/sync_assignment.py says which samples a member has in it. What a lost worker had of a round that is not
complete comes back. So an epoch uses each sample once.
"""
