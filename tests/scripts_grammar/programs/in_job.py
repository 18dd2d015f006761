"""A worker of a real job: runs the programs of these seeds that are right with workers as threads, and prints which of
them end otherwise here."""

import json
import sys
from dataclasses import replace

import dmltrain
from tests.connected import connected
from tests.scripts_grammar.judging import difference, execute, judge, reference, valid
from tests.scripts_grammar.world import World

rank, workers = dmltrain.rank(), dmltrain.num_workers()
done, wrong = 0, {}
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    tried = replace(valid(seed)[0], workers=workers)
    expected = reference(tried)
    if judge(tried, connected, expected).kind == "right":
        world = World(dmltrain.distribute, workers, rank)
        execute(tried, world)
        done += 1
        if found := difference(world, expected, whole=True):
            wrong[seed] = found
print(json.dumps({"done": done, "wrong": wrong}))
