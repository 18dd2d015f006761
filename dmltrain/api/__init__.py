"""What users' scripts call, behind `dmltrain.distribute`, `State`, `loader` and `kvstore.create`.

`State` has what a checkpoint holds and a new member of an elastic job gets. `Loader` assigns the samples of each
epoch, so that each is used once, and tells the optimizer how much this worker's gradients count.
"""
