"""Codecs: the encoding is right to the bit, error feedback loses nothing, and what becomes of workers' residuals."""

import random
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmltrain.base.errors import UserError
from dmltrain.kvstore import codec
from dmltrain.kvstore.scratch import BLOCK
from dmltrain.kvstore.transport import wire
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker import residual
from dmltrain.kvstore.worker.links.sharding import Slice
from dmltrain.kvstore.worker.links.undo import HostResidual, Undo
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice
from dmltrain.kvstore.worker.residual import ResidualHandover
from tests.kvstore.through_a_codec import decode, encode, through
from tests.tiers import examples

VARIANTS = [{"type": "2bit", "threshold": 0.01}, {"type": "topk", "ratio": 0.05}]
VARIED = {each["type"] for each in VARIANTS}
ALL = [*({"type": each.name} for each in codec.TABLE if each.fixed_size or each.name not in VARIED), *VARIANTS]
LENGTHS = [0, 1, 2, 3, 5, 511, 512, 513, 1027, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 515]
every = pytest.mark.parametrize("parameters", ALL, ids=lambda parameters: "-".join(map(str, parameters.values())))


def normal(length, scale=0.01, seed=0):
    return (np.random.default_rng(seed).standard_normal(length) * scale).astype(np.float32)


def there_and_back(parameters, values):
    return through(codec.make(parameters), np.array(values, np.float32))


@every
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_not_sent_is_in_the_residual_and_adding_equals_decoding_and_then_adding(parameters, length):
    kind, source, residual = codec.make(parameters), normal(length), normal(length, 0.003, seed=1)
    kept, expected = source.copy(), source.astype(np.float64) + residual
    data = encode(kind, source, residual)
    sent = decode(kind, data, length)
    np.testing.assert_allclose(sent.astype(np.float64) + residual, expected, rtol=1e-6, atol=1e-9)
    assert np.array_equal(source, kept)
    assert length < 100 or 0 < np.abs(residual).max() < np.abs(expected).max()
    total = normal(length, seed=2)
    both = total + sent
    kind.add(data, total)
    assert np.array_equal(total, both)


@every
def test_the_bytes_depend_on_the_values_only(parameters):
    kind, length = codec.make(parameters), 2 * BLOCK + 515
    source, residual = normal(length), normal(length, seed=1)
    left = residual.copy()
    expected = encode(kind, source, left)
    for offset in range(1, 4):
        shifted, rest, out = (np.empty(length + 4, np.float32)[offset : offset + length] for _ in range(3))
        shifted[:], rest[:] = source, residual
        assert np.array_equal(encode(kind, shifted, rest), expected) and np.array_equal(rest, left)
        kind.decode(expected, out)
        assert np.array_equal(out, decode(kind, expected, length))


@every
def test_threads_do_not_disturb_each_other(parameters):
    kind, sources = codec.make(parameters), [normal(3 * BLOCK, seed=seed) for seed in range(4)]
    expected = [through(kind, source) for source in sources]

    def work(index):
        return all(np.array_equal(through(kind, sources[index]), expected[index]) for _ in range(20))

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(work, range(4))) == [True] * 4


@every
@pytest.mark.parametrize("value", [1e-45, -3e-42, 1e-38, 1e-36, 3.4e38, -np.finfo(np.float32).max])
def test_tiny_and_huge_values_are_sent_or_kept(parameters, value):
    kind, residual = codec.make(parameters), np.zeros(600, np.float32)
    source = np.zeros(600, np.float32)
    assert not through(kind, source, residual).any() and not residual.any(), "zeros stay zeros"
    source[7] = value
    sent = through(kind, source, residual)
    if np.isfinite(sent).all():
        assert np.float64(sent[7]) + np.float64(residual[7]) == pytest.approx(float(source[7]), rel=1e-6)
    else:  # beyond fp16, or rounded up beyond bf16
        assert abs(value) > 3.3e38 and not kind.needs_residual and sent[7] == np.sign(value) * np.inf
        assert residual[7] == 0
    assert np.count_nonzero(sent) <= 1 and np.count_nonzero(residual) <= 1


@every
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("length, where", [(5, 4), (2 * BLOCK + 3, BLOCK + 3), (2 * BLOCK + 3, 2 * BLOCK + 2)])
def test_nonfinite_values_are_visible_once_and_leave_no_residual(parameters, value, length, where):
    kind, source, residual = codec.make(parameters), normal(length), np.zeros(length, np.float32)
    source[where] = value
    sent = through(kind, source, residual)
    assert not np.isfinite(sent[where]) and np.isfinite(residual).all()
    grouped = parameters in ({"type": "int8"}, {"type": "2bit"})
    group = slice(where // 512 * 512, where // 512 * 512 + 512) if grouped else slice(where, where + 1)
    others = np.ones(length, bool)
    others[group] = False
    assert np.isfinite(sent[others]).all()
    assert np.isfinite(through(kind, normal(length), residual)).all() and np.isfinite(residual).all()
    residual[where] = 3e38
    sent = through(kind, residual.copy(), residual)
    assert not np.isfinite(sent[where]) and np.isfinite(residual).all(), "the sum overflows"


@every
@pytest.mark.parametrize("call", ["encode", "decode", "add"])
def test_a_wrong_number_of_bytes_is_named(parameters, call):
    kind = codec.make(parameters)
    wrong, right = np.zeros(kind.nbytes(100) + 1, np.uint8), np.zeros(100, np.float32)
    with pytest.raises(ValueError, match=f"{kind.name}: 100 elements take {kind.nbytes(100)} bytes"):
        getattr(kind, call)(*(right, wrong) if call == "encode" else (wrong, right))


def any_bits(seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 32, 400_000, dtype=np.uint32).view(np.float32)


def test_fp16_equals_numpys_conversion():
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    middles = (halves[:-1] + halves[1:]) / 2
    beside = [np.nextafter(middles, np.float32(sign * np.inf)) for sign in (-1, 1)]
    edges = np.array([65503.9, 65519.99, 65520, 65536, 1e9, np.inf, -np.inf, np.nan, -0.0], np.float32)
    source = np.concatenate([halves, middles, *beside, edges, any_bits()])
    data = encode(codec.make({"type": "fp16"}), source)
    with np.errstate(all="ignore"):
        expected = source.astype(np.float16)
    same = (data.view(np.uint16) == expected.view(np.uint16)) | (np.isnan(source) & np.isnan(data.view(np.float16)))
    assert same.all()
    np.testing.assert_array_equal(decode(codec.make({"type": "fp16"}), data, source.size), expected.astype(np.float32))


@pytest.mark.parametrize("greatest", [65504, 65519.99, 65520, 65535.99, 65536, 65536.5, 65537, 131071, 131072, 3e38])
def test_fp16_is_right_for_each_largest_value_of_a_block(greatest):
    """Blocks up to a value between these are rounded without a check of every element."""
    source = np.array([greatest, -greatest, 1, 0], np.float32)
    with np.errstate(all="ignore"):
        expected = source.astype(np.float16)
    assert encode(codec.make({"type": "fp16"}), source).view(np.float16).tolist() == expected.tolist()


def test_bf16_rounds_to_nearest_ties_to_even():
    source = any_bits()
    source = source[np.abs(source) < 3.38e38]  # finite, also when rounded up
    below = (source.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # towards 0
    above = (below.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    to_below, to_above = (np.abs(source.astype(np.float64) - side) for side in (below, above))
    even = np.where(below.view(np.uint32) & np.uint32(0x10000), above, below)
    expected = np.where(to_below == to_above, even, np.where(to_below < to_above, below, above))
    assert np.array_equal(through(codec.make({"type": "bf16"}), source).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_nan_stays_nan(name, bits):
    assert np.isnan(there_and_back({"type": name}, np.array([1, bits], np.uint32).view(np.float32))[1])


def test_the_encoding_is_stable():
    values = np.array([1.0, -2.5, 0.1, 3.0, 0.0, -0.6], np.float32)
    golden = {
        "bf16": "803f20c0cd3d404000001abf",
        "fp16": "003c00c1662e00420000cdb8",
        "int8": "0683c13c2a96047f00e7",
        "2bit": "4908",
        "topk": "0300000000004040",
    }
    exact = np.array([1.0, -2.5, 0.125, 3.0, 0.0, -0.625], np.float32)
    assert encode(codec.make({"type": "2bit"}), exact).tobytes().hex() == "0000e03e000030404c08"  # 0.4375, 2.75
    for name, expected in golden.items():
        parameters = {"threshold": 0.5} if name == "2bit" else {}
        assert encode(codec.make({"type": name, **parameters}), values).tobytes().hex() == expected, name


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=700))
@settings(deadline=None, max_examples=examples(30))
def test_int8_errs_by_half_a_step_of_the_group(values):
    source = np.array(values, np.float32)
    sent = there_and_back({"type": "int8"}, source)
    for start in range(0, source.size, 512):
        group, step = source[start : start + 512], np.abs(source[start : start + 512]).max() / 127
        assert np.abs(sent[start : start + 512] - group).max() <= max(step * 0.5001, 1.5e-36)


def test_2bit_sends_one_threshold_at_a_time():
    kind, residual = codec.make({"type": "2bit", "threshold": 0.5}), np.zeros(5, np.float32)
    source = np.array([0.5, -0.5, 0.49, -1.2, 0.2], np.float32)
    for third, last in ((0, 0), (0.5, 0), (0.5, 0.5)):
        assert through(kind, source, residual).tolist() == [0.5, -0.5, third, -0.5, last]


@pytest.mark.parametrize("shape", ["normal", "equal", "one", "heavy", "outlier"])
def test_2bit_without_a_threshold_sends_the_means_of_large_and_small_values_of_each_512(shape):
    source = {
        "normal": normal(5000),
        "equal": np.full(5000, -0.3, np.float32),
        "one": np.eye(1, 5000, 77)[0],
        "heavy": normal(5000) ** 3,
        "outlier": np.where(np.arange(5000) == 600, 1e4, normal(5000)),
    }[shape].astype(np.float32)
    sent = there_and_back({"type": "2bit"}, source)
    for start in range(0, source.size, 512):
        part, found = (each[start : start + 512] for each in (source, sent))
        magnitude = np.abs(part)
        great = magnitude >= 1.4 * magnitude.mean() * (1 + 1e-6)
        expected = np.zeros_like(part)
        for level in (great, ~great):
            expected[level] = magnitude[level].mean() if level.any() else 0
        np.testing.assert_allclose(found, np.where(part < 0, -1, 1) * expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("length", [1, 513, BLOCK + 700])
def test_2bit_residual_is_the_exact_difference_from_the_decoded_values(length):
    source, residual = normal(length), normal(length, 0.004, seed=1)
    source[::7], residual[::7] = -0.0, -0.0
    expected = source + residual
    sent = through(codec.make({"type": "2bit"}), source, residual)
    assert np.array_equal(residual, expected - sent)


def test_2bit_sends_sums_in_steps_of_as_many_thresholds():
    assert codec.make({"type": "2bit", "threshold": 0.25}).of_sum(4) == codec.make({"type": "2bit", "threshold": 1})
    for kind in [codec.make({"type": each}) for each in ("bf16", "int8", "2bit", "topk")]:
        assert kind.of_sum(4) is kind


@pytest.mark.parametrize("ratio", [1e-9, 0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("shape", ["normal", "few", "equal", "periodic", "ascending"])
def test_topk_sends_the_largest_values_for_any_sample_and_the_first_of_equal_ones(ratio, shape):
    length = 50_021
    source = {
        "normal": normal(length),
        "equal": np.ones(length, np.float32),
        "few": np.where(np.arange(length) % 9973 == 1, 1, 0).astype(np.float32),
        "periodic": (np.arange(length) % 7 != 0).astype(np.float32),
        "ascending": np.arange(length, dtype=np.float32),
    }[shape]
    kind = codec.make({"type": "topk", "ratio": ratio})
    greatest = np.sort(np.argsort(-np.abs(source), kind="stable")[: kind.count(length)])
    expected = np.zeros(length, np.float32)
    expected[greatest] = source[greatest]
    data = encode(kind, source)
    assert np.array_equal(data[: 4 * greatest.size].view(np.uint32), greatest)
    assert np.array_equal(decode(kind, data, length), expected)


def test_topk_drops_nonfinite_values_that_it_could_not_send():
    source = np.full(1000, np.nan, np.float32)
    source[::2], residual = -np.inf, np.zeros(1000, np.float32)
    sent = through(codec.make({"type": "topk", "ratio": 0.01}), source, residual)
    assert np.count_nonzero(np.isnan(sent)) == 10 and not residual.any()


def test_topk_refuses_positions_out_of_range():
    kind = codec.make({"type": "topk", "ratio": 0.1})
    data = encode(kind, normal(100))
    data[36:40].view(np.uint32)[0] = 100
    for call in (kind.decode, kind.add):
        with pytest.raises(ValueError, match="position 100 .* 100 elements"):
            call(data, np.zeros(100, np.float32))


def test_type_numbers_are_those_of_the_protocol():
    assert codec.make({"type": "none"}) is None
    facts = {each.name: (each.number, each.needs_residual) for each in codec.TABLE}
    published = {"bf16": (2, False), "fp16": (3, False), "int8": (4, True), "2bit": (5, True), "topk": (6, True)}
    assert {name: facts[name] for name in published} == published
    for name, fact in facts.items():
        made = codec.make({"type": name})
        assert (made.name, (made.number, made.needs_residual)) == (name, fact)
    assert ("none", *facts) == codec.TYPES and len(facts) == len(codec.TABLE)
    numbers = {number for number, _ in facts.values()}
    assert len(numbers) == len(facts) and min(numbers) >= len(wire.DTYPES) and max(numbers) == wire.MAX_DTYPE


def test_each_row_gives_the_encoded_size():
    """`size` is a formula of n for the documentation; the first alternative is the default's. Forecasts compare only
    those with a fixed size."""
    for each in codec.TABLE:
        formula = each.size.partition(";")[0].replace("ratio", "0.01")
        formula = re.sub(r"(?<=[0-9])n", " * n", formula)
        assert each.create(None).nbytes(1 << 20) == pytest.approx(eval(formula, {"n": 1 << 20}), rel=2e-3), each.name
    assert set(codec.size_ratios()) == set(codec.TYPES) - {each.name for each in codec.TABLE if not each.fixed_size}
    assert "int8" in codec.size_ratios() and "topk" not in codec.size_ratios()


def test_defaults_and_parameters():
    assert codec.make({"type": "2bit", "threshold": 2}) == codec.make({"type": "2bit", "threshold": 2.0})
    assert codec.make({"type": "2bit", "threshold": None}) == codec.make({"type": "2bit"})
    assert codec.make({"type": "topk"}) == codec.make({"type": "topk", "ratio": 0.01})
    assert codec.make({"type": "2bit", "threshold": 2}) != codec.make({"type": "2bit"})


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"type": "1bit"}, f"'1bit'.* {', '.join(codec.TYPES)}"),
        ({}, "no type None.* none, bf16"),
        ({"type": "int8", "threshold": 0.5}, "int8 has no parameter 'threshold'.* none"),
        ({"type": "none", "ratio": 0.5}, "none has no parameter 'ratio'"),
        ({"type": "2bit", "ratio": 0.5}, "2bit has no parameter 'ratio'.* 'threshold'"),
        ({"type": "2bit", "threshold": 0}, "2bit: threshold is 0, .* 1e-30 to 1e\\+30$"),
        *(({"type": "2bit", "threshold": float(each)}, f"threshold is {each}") for each in ("nan", "inf")),
        ({"type": "2bit", "threshold": "0.5"}, "threshold is '0.5', expected a number"),
        ({"type": "2bit", "threshold": True}, "threshold is True, expected a number"),
        ({"type": "topk", "ratio": 1.5}, "topk: ratio is 1.5, .* 1e-09 to 1$"),
    ],
)
def test_wrong_parameters_are_explained(parameters, message):
    with pytest.raises(ValueError, match=message):
        codec.make(parameters)


TWO_BITS = codec.make({"type": "2bit", "threshold": 1.0})


def slices(*lengths):
    ranges = [Slice(0, index, 0, length, 0) for index, length in enumerate(lengths)]
    made = [WorkerSlice(range_, np.dtype(np.float32), TWO_BITS, None) for range_ in ranges]
    for number, slice_ in enumerate(made):
        slice_.residual.values[:] = np.arange(slice_.range.length) + 10 * number
    return made


def read(slices):
    return [slice_.residual.read().tolist() for slice_ in slices]


def test_gathered_and_loaded_residuals_are_unchanged_and_those_of_another_worker_added():
    before, after = slices(3, 1, 2), slices(3, 1, 2)
    held = residual.gathered(before)
    assert held.tolist() == [0, 1, 2, 10, 20, 21]
    for slice_ in after:
        slice_.residual.write(np.full(1, -1))
    residual.spread(after, [np.zeros(6, np.float32), held], lambda slice_: [1])
    assert read(after) == read(before)
    own, other = slices(3, 1, 2), slices(3, 1, 2)
    residual.add(own, residual.gathered(other))
    assert read(own) == [[0, 2, 4], [20], [40, 42]]


def test_each_slice_gets_the_sum_of_its_workers():
    """This worker gets the residuals of two workers for the second slice, its own for the first, none for the last."""
    own = slices(2, 2, 2)
    workers = [np.full(6, number, np.float32) for number in (1, 10, 100)]
    residual.spread(own, workers, lambda slice_: {0: [2], 1: [0, 1], 2: []}[slice_.range.index])
    assert read(own) == [[100, 100], [11, 11], [0, 0]]


@pytest.mark.parametrize("sizes", [[5], [7], [6, 5], [7, 6], []], ids=str)
def test_residuals_of_another_model_are_refused(sizes):
    """NumPy would read the beginning of a longer residual, and stop in the middle of a shorter one."""
    own = slices(3, 3)
    said = "belong to another model or another compression: continue with the same --network and --gc"
    with pytest.raises(UserError, match=said):
        residual.spread(own, [np.ones(size, np.float32) for size in sizes], lambda slice_: range(len(sizes)))
    assert read(own) == read(slices(3, 3))


def keep_and_add(undo, op):
    undo.keep(op)
    undo.residual.values += op


def test_random_rounds_leave_what_committed_rounds_have_left_and_a_new_member_begins_at_zero():
    for seed in range(200):
        chance, undo, committed = random.Random(seed), Undo(HostResidual(np.zeros(3, np.float32))), 0.0
        op = 0
        for _ in range(20):
            op += chance.choice([1, 1, 3])  # between rounds there are other ops
            for _ in range(chance.choice([0, 0, 1, 2])):  # aborted rounds, each ends with a view
                if chance.random() < 0.7:  # else it was not encoded yet
                    keep_and_add(undo, op)
                undo.back_to(op - 1)
            keep_and_add(undo, op)
            committed += op
            if chance.random() < 0.2:
                undo.back_to(op)
            assert (undo.residual.values == committed).all(), f"seed {seed}"
    undo = Undo(HostResidual(np.zeros(2, np.float32)))
    keep_and_add(undo, 7)
    undo.forget()
    assert not undo.residual.values.any()
    keep_and_add(undo, 3)
    undo.back_to(2)
    assert not undo.residual.values.any()


HANDED_OVER = (3, 600, 1)


class Entry:
    """A key with one slice."""

    def __init__(self, length, chance, codec_name):
        made = codec.make({"type": codec_name})
        self.slices = [WorkerSlice(Slice(0, 0, 0, length, 0), np.dtype(np.float32), made, None)]
        for slice_ in self.slices if made.needs_residual else ():
            slice_.residual.values[:] = chance.standard_normal(length)
            slice_.undo = Undo(slice_.residual)


class Entries(list):
    @property
    def undos(self):
        return (slice_.undo for entry in self for slice_ in entry.slices if slice_.undo)

    @property
    def values(self):
        return [slice_.residual.values.copy() for entry in self for slice_ in entry.slices if slice_.undo]


def handed_over(view, codec_name="int8"):
    """Member -> its residuals before and after the op; and the number of broadcasts."""
    chance = np.random.default_rng(3)
    entries = {member: Entries(Entry(length, chance, codec_name) for length in HANDED_OVER) for member in view.members}
    before = {member: entries[member].values for member in view.members}
    wire, calls = {}, []

    def broadcast(member):
        def run(values, needed, source):
            calls.append((member, source, needed))
            if member == source:
                wire[source] = values.copy()
            elif needed:
                values[:] = wire[source]

        return run

    members = {member: ResidualHandover(member, entries[member], broadcast(member)) for member in view.members}
    in_order = sorted(view.members, key=lambda each: each not in view.hands_over)
    taken = {each: members[each].exchange(view) for each in in_order}
    for each in view.members:
        same = map(np.array_equal, before[each], entries[each].values)
        assert codec_name != "int8" or all(same), "nothing changes before it is recognised"
        members[each].settle(view, taken[each])
    return before, {member: entries[member].values for member in view.members}, calls


def test_the_receiver_adds_what_the_others_had_and_they_have_nothing_left():
    view = View(2, 7, ((0, 1), (2, 4)), (0,), joined=(1,), hands_over=(0, 4))
    before, after, _ = handed_over(view)
    for place, length in enumerate(HANDED_OVER):
        expected = before[2][place] + before[0][place] + before[4][place]
        assert after[2][place].tolist() == expected.tolist()
        assert after[1][place].tolist() == before[1][place].tolist()
        assert after[0][place].tolist() == after[4][place].tolist() == [0.0] * length


def test_only_the_receiver_gets_them_and_without_residuals_nothing_travels():
    view = View(2, 7, ((0, 1), (2,)), (0,), hands_over=(1,))
    assert sorted(handed_over(view)[2]) == [(0, 1, True), (1, 1, False), (2, 1, False)]
    assert handed_over(view, "bf16")[2] == []
    assert handed_over(View(2, 7, ((0, 1), (2,)), (0,), joined=(2,)))[2] == []
