"""From options to the data of a run, and workers that have different data."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain import data, options
from dmltrain.base.errors import UserError
from dmltrain.data.assignment.parts import Local
from dmltrain.data.broken import SkippedRecords
from dmltrain.data.decoded import Decoded
from dmltrain.data.images import ImageAugmentation
from dmltrain.data.readers import open_reader
from dmltrain.data.readers.record_writer import RecordWriter
from dmltrain.train import loading
from dmltrain.train.loading import check_broken
from tests import image_records
from tests.scripts_grammar.memory_store import Group, MemoryStore


def together(words_of_each):
    """What `loaded` returns or raises on each of the workers of a job."""
    group = Group(len(words_of_each))

    def one(rank):
        try:
            return loaded(words_of_each[rank], MemoryStore(group, rank))
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(group.workers) as pool:
        return list(pool.map(one, range(group.workers)))


def loaded(words, store=None):
    """(data set, parts) for a command line."""
    store = store or MemoryStore(Group(1), 0)
    found = options.parse(words.split(), defaults={"batch_size": 4})
    dataset = loading.load_dataset(found, store, lambda line: None)
    return dataset, loading.parts_of(found, dataset, store), found


def error(words):
    with pytest.raises(UserError) as caught:
        loaded(words)
    return str(caught.value)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """a.rec and same.rec are copies; b.rec has other pictures, fewer of them."""
    folder = tmp_path_factory.mktemp("files")
    image_records.write(folder / "a.rec", range(24))
    image_records.write(folder / "same.rec", range(24))
    image_records.write(folder / "b.rec", range(24, 34))
    return folder


IMAGENET = "--dataset imagenet --num-classes 4 --image-shape 3,16,16"


# -- images that are made ---------------------------------------------------------------------------------------------


def test_synthetic_images_have_any_number_of_classes():
    dataset = loaded("--dataset synthetic --num-classes 300 --num-examples 600 --image-shape 1,4,4")[0]
    assert dataset.num_classes == 300 and set(dataset.train.labels) == set(dataset.validation.labels) == set(range(300))


def test_workers_with_local_parts_have_synthetic_samples_of_their_own_and_share_their_validation():
    words = "--dataset synthetic --num-classes 5 --num-examples 21 --image-shape 1,4,4"
    whole = loaded(words)[0]
    own = together([f"{words} --data-parts local"] * 2)
    for rank, (dataset, parts, _) in enumerate(own):
        assert (dataset.train.images == whole.train.images[rank::2]).all()
        assert (dataset.train.labels == whole.train.labels[rank::2]).all()
        assert (dataset.validation.images == whole.validation.images).all()
        assert isinstance(parts, Local) and parts.sizes == (11, 10)
    store = MemoryStore(Group(1), 0)
    dataset, _, found = loaded("--dataset synthetic --num-examples 40 --data-parts local", store)
    assert not loading.has_own_validation(found, dataset, store)


def test_fewer_validation_samples_are_the_first(files):
    whole, fewer = (loaded(f"--num-examples 20 {words}")[0] for words in ("", "--num-val-examples 7"))
    assert len(fewer.validation) == 7 and len(fewer.train) == len(whole.train) == 20
    seven = np.arange(7)
    for found, expected in zip(fewer.validation.evaluation(seven), whole.validation.evaluation(seven), strict=True):
        assert (found == expected).all()
    assert len(loaded("--num-val-examples 100000")[0].validation) == len(whole.validation)
    read = loaded(f"{IMAGENET} --data-train {files}/a.rec --data-val {files}/b.rec --num-val-examples 3")[0]
    assert len(read.validation) == 3


# -- files ------------------------------------------------------------------------------------------------------------


def test_imagenet_has_mxnets_defaults_and_grey_images_the_first_number_of_means(files):
    dataset, parts, _ = loaded(f"{IMAGENET} --data-train {files}/a.rec --data-val {files}/b.rec")
    assert (len(dataset.train), len(dataset.validation), dataset.num_classes) == (24, 10, 4)
    assert dataset.normalisation.mean == (123.68, 116.779, 103.939) and dataset.normalisation.std == (1.0, 1.0, 1.0)
    assert dataset.train.augmentation == ImageAugmentation() and parts.samples == 24
    grey = loaded(f"{IMAGENET} --data-train {files}/a.rec --image-shape 1,16,16")[0]
    assert grey.normalisation.mean == (123.68,) and grey.normalisation.std == (1.0,)
    assert len(grey.validation) == 0, "there may be none"


def test_several_files_a_folder_with_usual_names_and_an_index_elsewhere(files, tmp_path):
    assert len(loaded(f"{IMAGENET} --data-train {files}/a.rec {files}/b.rec")[0].train) == 34
    for name, source in (("train", "a"), ("val", "b")):
        for suffix in (".rec", ".idx"):
            (tmp_path / (name + suffix)).write_bytes((files / (source + suffix)).read_bytes())
    dataset = loaded(f"{IMAGENET} --data-dir {tmp_path}")[0]
    assert (len(dataset.train), len(dataset.validation)) == (24, 10)
    (tmp_path / "x.rec").write_bytes((files / "a.rec").read_bytes())
    (tmp_path / "moved.idx").write_bytes((files / "a.idx").read_bytes())
    given = f"--data-train {tmp_path}/x.rec --data-train-idx {tmp_path}/moved.idx"
    validation = f"--data-val {tmp_path}/x.rec --data-val-idx {tmp_path}/moved.idx"
    assert len(loaded(f"{IMAGENET} {given} {validation}")[0].validation) == 24
    assert not (tmp_path / "x.idx").exists()


def test_files_can_take_the_place_of_another_data_sets_own(files):
    """With its own crop, mirror, mean and std, and its number of classes."""
    dataset, _, _ = loaded(f"--dataset cifar10 --data-train {files}/a.rec")
    assert dataset.num_classes == 10 and dataset.image_shape == (3, 28, 28)
    assert dataset.train.augmentation == ImageAugmentation(pad_size=4, random_crop=True, random_mirror=True)
    assert dataset.normalisation.mean == data.DATASETS["cifar10"].normalisation.mean


IN_A_FILE = f"{IMAGENET} --data-train FOLDER/a.rec"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{IMAGENET} --data-dir FOLDER", "no images; give --data-train, for example"),
        (f"{IMAGENET} --data-val FOLDER/a.rec", "there are no training data: give --data-train"),
        (f"{IMAGENET} --data-train FOLDER/missing.rec", "missing.rec: no such file"),
        ("--dataset imagenet --data-train FOLDER/a.rec", "a.rec: record 0 .*give --num-classes"),
        ("--data-root FOLDER", "--data-root needs --data-train: --dataset digits reads its own files"),
        ("--num-classes 5", "--num-classes 5: digits has 10"),
        ("--num-val-examples 0", "not an integer of at least 1"),
        ("--data-parts local", "--data-parts local needs --data-train"),
        ("--enlarge 2", "--enlarge needs --image-shape"),
        (f"{IN_A_FILE} --top-k 5", "--top-k 5: imagenet has 4 classes"),
        (f"{IN_A_FILE} --data-parts local --num-examples 5", "--num-examples .*--data-parts local"),
        (f"{IN_A_FILE} --enlarge 9", "--enlarge is for data sets in memory: use --resize"),
        (f"{IMAGENET} --benchmark 1 --data-parts local", "--benchmark and --data-parts local exclude each other"),
        (f"{IN_A_FILE} --max-crop-size 5", "expected 1 <= min_crop_size <= max_crop_size"),
        (f"{IN_A_FILE} --aug-level 4", "augmentation level 4: expected 0 to 3"),
        (f"{IN_A_FILE} --random-resized-crop --random-crop", "random_resized_crop cannot be combined"),
    ],
)
def test_mistakes(files, words, expected):
    with pytest.raises(UserError, match=f"(?s){expected}"):
        loaded(words.replace("FOLDER", str(files)))


def test_images_of_folders_tell_their_classes(tmp_path):
    for number in range(6):
        folder = tmp_path / "train" / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.JPEG").write_bytes(image_records.jpeg(number, number % 3))
    assert loaded(f"--dataset imagenet --image-shape 3,16,16 --data-train {tmp_path}/train")[0].num_classes == 3


# -- augmentation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--aug-level 1", {"random_crop": True, "random_mirror": True}),
        ("--aug-level 3 --random-mirror 0 --max-random-h 5", {
            "random_crop": True, "max_random_h": 5, "max_random_s": 50, "max_random_l": 50,
            "max_random_rotate_angle": 10, "max_random_shear_ratio": 0.1, "max_random_aspect_ratio": 0.25,
        }),
        ("--use-imagenet-data-augmentation 1 --pca-noise 0", {
            "random_resized_crop": True, "random_mirror": True, "min_random_area": 0.08,
            "min_random_aspect_ratio": 3 / 4, "max_random_aspect_ratio": 4 / 3,
            "brightness": 0.4, "contrast": 0.4, "saturation": 0.4,
        }),
        ("--aug-level 1 --random-resized-crop", {"random_resized_crop": True, "random_mirror": True}),
        ("--resize 40 --pad-size 3 --fill-value 0 --max-crop-size 20 --min-crop-size 18", {
            "resize": 40, "pad_size": 3, "fill_value": 0, "max_crop_size": 20, "min_crop_size": 18,
        }),
    ],
)  # fmt: skip
def test_options_of_augmentation(files, words, expected):
    dataset = loaded(f"{IMAGENET} --data-train {files}/a.rec {words}")[0]
    assert dataset.train.augmentation == dataset.validation.augmentation == ImageAugmentation(**expected)


def test_the_augmentation_of_ilsvrc12_has_a_std_of_its_own(files):
    words = f"{IMAGENET} --data-train {files}/a.rec --use-imagenet-data-augmentation"
    assert loaded(words)[0].normalisation.std == (58.393, 57.12, 57.375)
    assert loaded(f"{words} --rgb-std 2")[0].normalisation.std == (2.0,)
    found = loaded(f"{words} --rgb-mean 1,2,3 --rgb-std 4,5,6")[0].normalisation
    assert (found.mean, found.std) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


def test_data_sets_in_memory_go_through_the_same_augmentation_or_stay_as_they_are_or_are_enlarged():
    dataset = loaded("--dataset synthetic --num-examples 40 --max-random-rotate-angle 5 --image-shape 3,48,40")[0]
    assert isinstance(dataset.train, Decoded) and dataset.image_shape == (3, 48, 40)
    images, labels = dataset.train.training(np.arange(5), np.arange(5, dtype=np.uint64) << np.uint64(40))
    assert images.shape == (5, 3, 48, 40) and labels.tolist() == [0, 1, 2, 3, 4]
    assert dataset.normalisation.mean == (127.0,)
    assert not isinstance(loaded("--dataset synthetic --num-examples 40")[0].train, Decoded)
    dataset = loaded("--dataset synthetic --num-examples 8 --enlarge 9 --image-shape 3,299,299")[0]
    assert dataset.train.evaluation(np.arange(2))[0].shape == (2, 3, 299, 299)


# -- mean image -------------------------------------------------------------------------------------------------------


def test_a_mean_image_is_made_by_all_workers_and_read_again(files, tmp_path):
    words = f"{IMAGENET} --data-train {files}/a.rec --batch-size 2 --mean-img {tmp_path}/mean.npy"
    found = together([words] * 3)
    images = loaded(f"{IMAGENET} --data-train {files}/a.rec")[0].train.evaluation(np.arange(24))[0]
    for dataset, _, _ in found:
        np.testing.assert_allclose(dataset.normalisation.mean, images.astype(float).mean(axis=0), rtol=1e-6)
    again = loaded(words)[0].normalisation
    assert np.array_equal(again.mean, found[0][0].normalisation.mean)
    assert "an array of (3, 16, 16), expected (3, 16, 18)" in error(f"{words} --image-shape 3,16,18")


def test_a_mean_image_of_mxnet(files, tmp_path):
    mx = pytest.importorskip("mxnet")
    values = np.random.default_rng(0).uniform(0, 255, (3, 16, 16)).astype(np.float32)
    mx.nd.save(str(tmp_path / "mean.bin"), {"mean_img": mx.nd.array(values)})
    normalisation = loaded(f"{IMAGENET} --data-train {files}/a.rec --mean-img {tmp_path}/mean.bin")[0].normalisation
    assert np.array_equal(normalisation.mean, values)


def test_a_mean_image_that_cannot_be_read_or_made(files, tmp_path):
    given = f"{IMAGENET} --data-train {files}/a.rec --mean-img"
    (tmp_path / "noise.npy").write_bytes(b"noise")
    (tmp_path / "noise.bin").write_bytes(b"noise")
    for name in ("noise.npy", "noise.bin"):
        assert f"--mean-img {tmp_path}/{name}: cannot be read as a mean image" in error(f"{given} {tmp_path}/{name}")
    assert "give a name that ends with .npy" in error(f"{given} {tmp_path}/missing.bin")
    assert "cannot be written: No such file" in error(f"{given} {tmp_path}/missing/mean.npy")


def test_broken_records_of_a_mean_image_do_not_count_for_the_first_epoch(files, tmp_path):
    """A name that it cannot have is an error before the images are read."""
    writer = RecordWriter(tmp_path / "broken.rec")
    for key in range(7):
        writer.write(0.0, key, open_reader(files / "a.rec").read(key).image)
    writer.write(0.0, 7, b"no image")
    writer.finish()
    given = f"{IMAGENET} --data-train {tmp_path}/broken.rec --mean-img {tmp_path}/missing.bin"
    assert "missing.bin: no such file, for 1 of 1 workers" in error(given)
    given = f"{IMAGENET} --data-train {tmp_path}/broken.rec --skip-broken 1 --mean-img {tmp_path}/mean.npy"
    assert not loaded(given)[0].broken.take()
    assert (tmp_path / "mean.npy").exists()


# -- parts ------------------------------------------------------------------------------------------------------------


def test_more_examples_than_there_are_make_longer_epochs(files):
    _, parts, _ = loaded(f"{IMAGENET} --data-train {files}/a.rec --num-examples 100")
    assert parts.samples == 100 and parts.steps == 25 and parts.num_examples == 24
    dataset, parts, _ = loaded(f"{IMAGENET} --data-train {files}/a.rec --num-examples 10")
    assert len(dataset.train) == parts.samples == parts.num_examples == 10
    assert loaded("--num-examples 2000")[1].samples == 2000  # digits


def test_the_benchmark_needs_no_files():
    dataset, parts, _ = loaded("--dataset imagenet --benchmark 1 --num-classes 21841 --image-shape 3,24,20")
    assert dataset.num_classes == 21841 and dataset.image_shape == (3, 24, 20) and parts.steps == 500
    assert loaded("--dataset imagenet --benchmark 1 --num-examples 40 --image-shape 3,9,9")[1].samples == 40


def test_the_benchmark_has_the_sizes_of_each_epoch():
    words = "--image-shape 3,20,24:0 3,12,12:2 --val-image-shape 3,32,32"
    dataset, _, options = loaded(f"--dataset imagenet --benchmark 1 --num-examples 8 {words}")
    assert dataset.image_shape == (3, 12, 12)
    samples = [loading.train_samples(options, dataset, epoch) for epoch in (0, 1, 2)]
    found = [each.training(np.arange(8), np.zeros(8, np.uint64))[0] for each in samples]
    assert [images.shape for images in found] == [(8, 3, 20, 24), (8, 3, 20, 24), (8, 3, 12, 12)]


def test_a_batch_larger_than_a_part(files):
    words = f"{IMAGENET} --data-train {files}/a.rec --batch-size 9"
    found = together([words] * 3)
    assert all("--batch-size 9" in each and "24" in each for each in found)


def test_threads(files, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for words, expected in ((f"{IMAGENET} --data-train {files}/a.rec", 3), ("", 1), ("--data-nthreads 7", 7)):
        dataset, _, found = loaded(words)
        assert loading.threads(found, dataset) == expected


def test_workers_with_different_data_are_named(files):
    same, other = (f"{IMAGENET} --data-train {files}/{name}.rec" for name in ("same", "b"))
    first = f"{IMAGENET} --data-train {files}/a.rec"
    assert all(not isinstance(each, str) for each in together([first, same, first]))
    found = together([first, same, other])
    assert len(set(found)) == 1 and "different training data; look at worker 2:" in found[0]
    assert "--data-parts local" in found[0]
    assert "look at worker 0:" in together([other, first, same])[0]
    with_validation = f"{first} --data-val {files}/b.rec"
    assert "different validation data; look at worker 1" in together([with_validation, f"{first}", with_validation])[0]


def test_local_parts_have_any_sizes_and_are_not_the_same(files):
    words = [f"{IMAGENET} --data-parts local --data-train {files}/{name}.rec" for name in "ab"]
    found = together(words)
    for _, parts, _ in found:
        assert parts == Local((24, 10), 4) and parts.samples == 34
    assert [len(dataset.train) for dataset, _, _ in found] == [24, 10]
    words = [f"{IMAGENET} --data-parts local --data-train {files}/{name}.rec" for name in ("a", "b", "same")]
    assert all("workers 0 and 2 have the same training data" in each for each in together(words))


def test_each_worker_names_its_own_file_or_folder_of_images_by_its_number(files, tmp_path):
    for rank, name in enumerate("ab"):
        (tmp_path / f"{rank}.rec").symlink_to(files / f"{name}.rec")
        (tmp_path / f"{rank}.index").symlink_to(files / f"{name}.idx")
    words = f"{IMAGENET} --data-parts local"
    for kind in ("train", "val"):
        words += f" --data-{kind} {tmp_path}/{{rank}}.rec --data-{kind}-idx {tmp_path}/{{rank}}.index"
    found = together([words] * 2)
    assert [len(dataset.train) for dataset, _, _ in found] == [24, 10]
    assert [len(dataset.validation) for dataset, _, _ in found] == [24, 10]
    places = [loading.place(given, rank) for rank, (_, _, given) in enumerate(found)]
    assert places == [f" in {tmp_path}/{rank}.rec" for rank in range(2)]
    for rank in range(2):
        (tmp_path / f"images-{rank}").mkdir()
        (tmp_path / f"images-{rank}" / "a.jpg").write_bytes(open_reader(files / "a.rec").read(0).image)
    (tmp_path / "x.lst").write_text("0\t0\ta.jpg\n" * 8)
    words = f"{IMAGENET} --data-train {tmp_path}/x.lst --data-root {tmp_path}/images-{{rank}}"
    assert [len(dataset.train) for dataset, _, _ in together([words] * 2)] == [8, 8]


def test_local_parts_with_other_classes(files, tmp_path):
    image = open_reader(files / "a.rec").read(0).image
    for rank, names in enumerate(("ab", "ac")):
        for name in names:
            (tmp_path / str(rank) / name).mkdir(parents=True)
            (tmp_path / str(rank) / name / "1.jpg").write_bytes(image)
    words = f"{IMAGENET} --data-parts local --data-train {tmp_path}/{{rank}}"
    for found in together([words] * 2):
        assert "workers have different classes" in found and "the same label must mean the same class" in found


@pytest.mark.parametrize("elastic", [True, False])
def test_a_record_that_two_members_of_an_elastic_job_have_met_counts_once(elastic):
    broken = SkippedRecords(2, lambda line: None)
    for problem in ("record 5", "record 17", "record 5"):
        broken.note(problem, False, None)

    def all_reduce(name, own):
        """Another member has met the first of the records that this one names."""
        if name == "skipped records":
            return own + [0, 1]
        return own + [0, 0, own[0], 0]

    store = SimpleNamespace(num_workers=2, rank=0, elastic=elastic, all_reduce=all_reduce, repeat=lambda block: block())
    log = SimpleNamespace(warning=lambda *words: None)
    with contextlib.nullcontext() if elastic else pytest.raises(UserError, match="skipped 3 records"):
        check_broken(SimpleNamespace(broken=broken), store, log)
