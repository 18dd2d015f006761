"""Communication hooks of DistributedDataParallel: dmltrain.torch.hooks."""

from pathlib import Path

from dmltrain.kvstore import codec as codecs

PROGRAM = Path(__file__).parent / "programs/torch_hooks.py"
REFUSED = (
    "needs servers, and a group with all workers of the job: start the job with -s 1",
    "register_comm_hook(int, ...): expected dmltrain.torch.hooks.State() or None",
    "needs dmltrain's servers, this group has the backend gloo",
)


def test_means_are_those_of_one_process_with_the_same_codec_and_fewer_bytes_travel(start_forked, tmp_path):
    names = ("none", "bf16", "int8", "2bit", "topk")
    job = start_forked(PROGRAM, tmp_path / "meeting", *names, workers=2, servers=2)
    job.succeed()
    for rank in range(2):
        rows = iter(job.results(rank)[len(REFUSED) :])
        for name in names:
            for turn in range(2 if name == "topk" else 1):
                row = next(rows)
                assert row.pop("coded") == (0 if name == "none" else 2), (name, row)
                assert row == {"turn": turn, "right": True, "kept": True, "same": True}, name
            share, expected = next(rows)["share"], {**codecs.size_ratios(), "topk": 0.02}[name]
            assert name == "none" or share < 1.02 * expected + 0.01, (name, share)
        assert all(words in row["refused"] for words, row in zip(REFUSED[1:], job.results(rank)[1:], strict=False))


def test_a_hook_without_servers_is_refused(start_forked, tmp_path):
    job = start_forked(PROGRAM, tmp_path / "meeting", workers=1, servers=0)
    assert job.processes["worker-0"].wait(120) == 0
    assert all(words in row["refused"] for words, row in zip(REFUSED, job.results(0), strict=True))
