"""Data sets: files are read correctly, damaged files are named, and downloads resume and are verified."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import pickle
import re
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from hesscale.experiments.lab import data
from hesscale.experiments.lab.data import SOURCES, DataError, Remote, download, fetch, load

COUNTS = (5, 3)
SHAPES = {"mnist": (2, 4), "emnist": (3, 3), "emnist47": (3, 3), "cifar100": (3, 2, 4)}


def gz(content: bytes) -> bytes:
    """The same whenever it is done."""
    return gzip.compress(content, mtime=0)


@pytest.fixture(autouse=True)
def small_sets(monkeypatch):
    """Every set with few images of few pixels; no proxy between a test and its server."""
    for name, source in SOURCES.items():
        small = dataclasses.replace(source, counts=COUNTS, shape=SHAPES[name], classes=4)
        monkeypatch.setitem(SOURCES, name, small)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("HESSCALE_DATA", raising=False)


def images_of(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels_of(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint8) % 4


def idx(values: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    return head + values.tobytes()


def write_idx(root: Path, name: str, *, packed: bool = True) -> None:
    for count, start in zip(COUNTS, SOURCES[name].files, strict=True):
        for kind, values in (("images-idx3", images_of(count, *SHAPES[name])), ("labels-idx1", labels_of(count))):
            path = root / f"{start}-{kind}-ubyte{'.gz' if packed else ''}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gz(idx(values)) if packed else idx(values))


def cifar_entries(count: int, **changes: object) -> dict[str, object]:
    return {"data": images_of(count, 24), "fine_labels": labels_of(count).tolist(), "coarse_labels": [0] * count, **changes}


def write_cifar(root: Path, pickled) -> None:
    (root / "cifar-100-python").mkdir(parents=True)
    for count, file in zip(COUNTS, SOURCES["cifar100"].files, strict=True):
        (root / file).write_bytes(pickled(cifar_entries(count)))


def python_2_pickle(entries: dict[str, object]) -> bytes:
    """As the official files are: protocol 2, text and arrays' content as Python 2's strings."""

    def string(text: bytes) -> bytes:
        return b"T" + len(text).to_bytes(4, "little") + text

    def number(n: int) -> bytes:
        return b"J" + n.to_bytes(4, "little", signed=True)

    def value(x) -> bytes:
        if isinstance(x, np.ndarray):
            kind = b"cnumpy\ndtype\n" + string(b"u1") + number(0) + number(1) + b"\x87R"
            kind += b"(" + number(3) + string(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
            empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + string(b"b") + b"\x87R"
            shape = b"".join(map(number, x.shape))
            return empty + b"(" + number(1) + b"(" + shape + b"t" + kind + b"\x89" + string(x.tobytes()) + b"tb"
        return b"](" + b"".join(map(number, x)) + b"e"

    items = b"".join(string(key.encode()) + value(x) for key, x in entries.items())
    return b"\x80\x02}(" + items + b"u."


def is_as_written(dataset: data.Dataset, *shape: int) -> bool:
    return all(
        torch.equal(dataset.images(split), torch.from_numpy(images_of(count, *shape)))
        and dataset.labels(split).dtype == torch.int64
        and dataset.labels(split).tolist() == labels_of(count).tolist()
        for split, count in zip(("train", "test"), COUNTS, strict=True)
    )


def test_digits_need_no_files(tmp_path):
    digits = load("digits", tmp_path / "nowhere")
    assert len(digits.train_images) + len(digits.test_images) == 1797
    assert digits.train_images.dtype == torch.uint8
    assert digits.train_labels.bincount().min() > 100
    inputs = digits.inputs("test")
    assert inputs.dtype == torch.float32
    assert (inputs.min(), inputs.max()) == (0, 1)
    torch.testing.assert_close(inputs[3].view(8, 8) * 16, digits.test_images[3].float())
    download("digits", tmp_path)


def test_names():
    assert data.names() == ["digits", "mnist", "emnist", "emnist47", "cifar100"]
    with pytest.raises(DataError, match="no data set 'minst'; choose one of digits, mnist"):
        load("minst")


def test_the_folder_is_the_argument_or_the_variable_or_data(monkeypatch, tmp_path):
    assert data.folder() == Path("data")
    monkeypatch.setenv("HESSCALE_DATA", str(tmp_path))
    assert data.folder() == tmp_path
    assert data.folder(tmp_path / "other") == tmp_path / "other"
    write_idx(tmp_path, "mnist")
    assert is_as_written(load("mnist"), 2, 4)


@pytest.mark.parametrize("packed", [True, False])
def test_mnist(tmp_path, packed):
    write_idx(tmp_path, "mnist", packed=packed)
    mnist = load("mnist", tmp_path)
    assert is_as_written(mnist, 2, 4)
    assert (mnist.title, mnist.classes, mnist.scale) == ("MNIST", 4, 255)
    assert torch.equal(mnist.inputs("train"), torch.from_numpy(images_of(5, 8)).float() / 255)


@pytest.mark.parametrize(("name", "title"), [("emnist", "EMNIST (balanced)"), ("emnist47", "EMNIST-47 subset")])
def test_emnist_images_are_upright(tmp_path, name, title):
    write_idx(tmp_path, name)
    emnist = load(name, tmp_path)
    assert emnist.title == title
    assert torch.equal(emnist.test_images, torch.from_numpy(images_of(3, 3, 3)).transpose(1, 2))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "MNIST/raw/train-images-idx3-ubyte.gz"),
        ("emnist", "EMNIST/raw/emnist-balanced-train-images-idx3-ubyte.gz"),
        ("cifar100", "cifar-100-python/train"),
    ],
)
def test_a_missing_file_is_named_with_what_to_do(tmp_path, name, file):
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    assert f"{tmp_path / file} does not exist" in str(caught.value)
    assert f"hesscale data {name} --data {tmp_path}" in str(caught.value)
    assert "HESSCALE_DATA" in str(caught.value)


def test_no_download_is_offered_where_there_is_none(tmp_path):
    with pytest.raises(DataError, match=r"emnist47-train-images-idx3-ubyte.gz does not exist; put it there"):
        load("emnist47", tmp_path)
    with pytest.raises(DataError, match="emnist47 cannot be downloaded"):
        download("emnist47", tmp_path)


GOOD, LABELS = idx(images_of(3, 2, 4)), idx(labels_of(3))


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("t10k-images-idx3-ubyte", GOOD[:-1], "39 bytes, but should have 40"),
        ("t10k-images-idx3-ubyte", GOOD + b"\0", "41 bytes, but should have 40"),
        ("t10k-images-idx3-ubyte", GOOD[:15], "does not start like an IDX"),
        ("t10k-images-idx3-ubyte", b"", "does not start like an IDX"),
        ("t10k-images-idx3-ubyte", b"\0\0\x0d" + GOOD[3:], "does not start like an IDX"),
        ("t10k-images-idx3-ubyte", LABELS, "does not start like an IDX"),
        ("t10k-images-idx3-ubyte", idx(images_of(3, 4, 2)), "3 × 4 × 2 values, but should have 3 × 2 × 4"),
        ("t10k-images-idx3-ubyte", idx(images_of(2, 2, 4)), "2 × 2 × 4 values, but should have 3 × 2 × 4"),
        ("t10k-images-idx3-ubyte.gz", gz(GOOD)[:-9], "is damaged"),
        ("t10k-images-idx3-ubyte.gz", gz(GOOD)[:10] + b"\xff\xff" + gz(GOOD)[12:], "is damaged"),
        ("t10k-images-idx3-ubyte.gz", GOOD, "is damaged"),
        ("t10k-labels-idx1-ubyte.gz", gz(idx(np.array([0, 4, 1], np.uint8))), "has a label 4, but labels should be 0 to 3"),
        ("t10k-labels-idx1-ubyte.gz", gz(idx(labels_of(4))), "4 values, but should have 3"),
    ],
)
def test_a_damaged_idx_file_is_named_with_what_is_wrong(tmp_path, file, content, problem):
    write_idx(tmp_path, "mnist")
    path = tmp_path / "MNIST/raw" / file
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path)
    assert str(caught.value).startswith(f"{path} ")
    assert problem in str(caught.value)
    assert "remove it, and download it with `hesscale data" in str(caught.value)


@pytest.mark.parametrize("pickled", [python_2_pickle, lambda entries: pickle.dumps(entries, 2), lambda e: pickle.dumps(e, 4)])
def test_cifar(tmp_path, pickled):
    write_cifar(tmp_path, pickled)
    assert is_as_written(load("cifar100", tmp_path), 3, 2, 4)


def test_the_pickle_of_python_2_is_one():
    loaded = pickle.loads(python_2_pickle(cifar_entries(3)), encoding="bytes")
    assert (loaded[b"data"] == images_of(3, 24)).all()
    assert loaded[b"fine_labels"] == [0, 1, 2]


def test_cifar_with_columns_first(tmp_path):
    write_cifar(tmp_path, lambda entries: pickle.dumps({**entries, "data": np.asfortranarray(entries["data"])}, 2))
    assert is_as_written(load("cifar100", tmp_path), 3, 2, 4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data": images_of(3, 23)}, "3 × 23 values, but should have 3 × 24"),
        ({"data": images_of(4, 24)}, "4 × 24 values, but should have 3 × 24"),
        ({"data": images_of(3, 24).astype(np.int16)}, "data is not an array of bytes"),
        ({"data": images_of(3, 24).astype(np.int8)}, "data is not an array of bytes"),
        ({"data": images_of(3, 24).tolist()}, "AttributeError"),
        ({"data": np.dtype("u1")}, "damaged"),
        ({"fine_labels": [0, 1, 4]}, "has a label 4, but labels should be 0 to 3"),
        ({"fine_labels": [0, 1, -1]}, "has a label -1"),
        ({"fine_labels": [0, 1, 1.0]}, "has a label 1.0"),
        ({"fine_labels": [0, 1]}, "2 labels, but should have 3"),
        ({"fine_labels": None}, "damaged"),
    ],
)
def test_a_cifar_file_with_other_contents_is_refused(tmp_path, changes, problem):
    write_cifar(tmp_path, pickle.dumps)
    path = tmp_path / "cifar-100-python/test"
    path.write_bytes(pickle.dumps(cifar_entries(3, **changes), 2))
    with pytest.raises(DataError, match=re.escape(problem)) as caught:
        load("cifar100", tmp_path)
    assert str(caught.value).startswith(f"{path} ")


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps([1]), pickle.dumps({}), python_2_pickle(cifar_entries(3))[:-40]])
def test_a_damaged_cifar_file_is_refused(tmp_path, content):
    write_cifar(tmp_path, python_2_pickle)
    path = tmp_path / "cifar-100-python/test"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged, or not a file of CIFAR-100") as caught:
        load("cifar100", tmp_path)
    assert str(caught.value).startswith(f"{path} ")


ARRAY = (b"numpy.core.multiarray\n_reconstruct", b"numpy\ndtype", b"U\x48" + bytes(72))


@pytest.mark.parametrize(
    ("place", "other"),
    [(0, b"numpy\ndtype"), (1, b"_codecs\nencode"), (2, b"K\x48"), (2, b"U\x00")],
    ids=["another call", "another type", "a number, of which bytearray makes zeros", "nothing"],
)
def test_malformed_pickled_arrays_are_refused(tmp_path, place, other):
    write_cifar(tmp_path, pickle.dumps)
    path = tmp_path / "cifar-100-python/test"
    path.write_bytes(array_pickle(*ARRAY))
    assert load("cifar100", tmp_path).test_images.sum() == 0
    path.write_bytes(array_pickle(*ARRAY[:place], other, *ARRAY[place + 1 :]))
    with pytest.raises(DataError, match="data is not an array of bytes"):
        load("cifar100", tmp_path)


def array_pickle(call: bytes, kind: bytes, content: bytes) -> bytes:
    """Entries of a batch with an array of 3 × 24 bytes."""
    array = b"c" + call + b"\n)R(K\x01K\x03K\x18\x86c" + kind + b"\nU\x02u1\x85R\x89" + content + b"tb"
    return b"\x80\x02}(U\x04data" + array + b"U\x0bfine_labels](K\x00K\x01K\x02eu."


def attacks(mark: str) -> dict[str, bytes]:
    """Pickles that would leave a file, by what they would call."""
    touch = f"open({mark!r}, 'w')"
    text = b"X" + len(touch).to_bytes(4, "little") + touch.encode()
    shell = b"X" + len(f"touch {mark}").to_bytes(4, "little") + f"touch {mark}".encode()
    return {
        "posix.system": b"\x80\x02cposix\nsystem\n" + shell + b"\x85R.",
        "os.popen": b"\x80\x02(" + shell + b"ios\npopen\n.",
        "builtins.eval": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93" + text + b"\x85R.",
        "__builtin__.eval": b"\x80\x02c__builtin__\neval\n" + text + b"\x85R.",
        "builtins.getattr": b"\x80\x02cbuiltins\ngetattr\n.",
        "pathlib.Path": b"\x80\x02cpathlib\nPath\n" + shell + b"\x85\x81.",
        "numpy.load": b"\x80\x02cnumpy\nload\n" + shell + b"\x85R.",
        "numpy.core.multiarray.fromfile": b"\x80\x02cnumpy.core.multiarray\nfromfile\n" + shell + b"\x85R.",
        "numpy.dtype.__class__": b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93.",
        "_codecs.lookup": b"\x80\x02c_codecs\nlookup\n" + shell + b"\x85R.",
    }


@pytest.mark.parametrize("called", attacks(""))
@pytest.mark.parametrize("inside", [False, True])
def test_pickles_that_call_functions_are_refused(tmp_path, called, inside):
    mark = tmp_path / "mark"
    attack = attacks(str(mark))[called]
    write_cifar(tmp_path, python_2_pickle)
    path = tmp_path / "cifar-100-python/train"
    path.write_bytes(b"\x80\x04}(U\x04data" + attack[2:-1] + b"u." if inside else attack)
    with pytest.raises(DataError, match=re.escape(f"it asks for {called}, which")) as caught:
        load("cifar100", tmp_path)
    assert str(caught.value).startswith(f"{path} ")
    assert not mark.exists()


def test_the_refused_pickles_would_run_code(tmp_path):
    mark = tmp_path / "mark"
    for called in ("posix.system", "os.popen", "builtins.eval"):
        made = pickle.loads(attacks(str(mark))[called])
        if hasattr(made, "close"):
            made.close()
        assert mark.exists()
        mark.unlink()


def test_calls_for_arrays_are_recorded_and_not_executed():
    encode = b"\x80\x02c_codecs\nencode\nU\x01xU\x05codec\x86R."
    with pytest.raises(LookupError):
        pickle.loads(encode)
    found = data.InertUnpickler(io.BytesIO(encode)).load()
    assert (found.name, found.args) == ("_codecs.encode", ("x", "codec"))


class Server(ThreadingHTTPServer):
    """Files by name; ``breaks`` ends the next answer after so many bytes."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.breaks: int | None = None
        self.ranges = True
        self.asked: list[tuple[str, str | None]] = []

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        name, asked = self.path.lstrip("/"), self.headers.get("Range")
        self.server.asked.append((name, asked))
        content = self.server.files.get(name)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.server.ranges else 0
        if content is None or start >= len(content):
            self.send_error(404 if content is None else 416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end, self.server.breaks = self.server.breaks, None
        self.wfile.write(content[start:][:end])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


CONTENT = bytes(range(256)) * 500


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_an_interrupted_download_resumes(server, tmp_path):
    server.files["file"], server.breaks = CONTENT, 50_000
    path, part = tmp_path / "below/file", tmp_path / "below/file.part"
    with pytest.raises(DataError, match="only 50000 of 128000 bytes arrived") as caught:
        fetch(server.url("file"), path, sha256(CONTENT))
    assert f"run the same command to resume the download from {part}" in str(caught.value)
    assert part.read_bytes() == CONTENT[:50_000]
    assert not path.exists()
    seen = []
    fetch(server.url("file"), path, sha256(CONTENT), lambda *args: seen.append(args))
    assert path.read_bytes() == CONTENT
    assert server.asked == [("file", None), ("file", "bytes=50000-")]
    assert seen[-1] == ("file", 128_000, 128_000)
    assert seen[0][1] > 50_000
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_server_without_range_requests_restarts_the_download(server, tmp_path):
    server.files["file"], server.ranges = CONTENT, False
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    seen = []
    fetch(server.url("file"), tmp_path / "file", sha256(CONTENT), lambda *args: seen.append(args))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert seen[-1] == ("file", 128_000, 128_000)


def test_a_complete_partial_file_is_moved_to_its_path(server, tmp_path):
    server.files["file"] = CONTENT
    (tmp_path / "file.part").write_bytes(CONTENT)
    fetch(server.url("file"), tmp_path / "file", sha256(CONTENT))
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("part", [b"", b"\1", CONTENT + b"\1"])
def test_a_wrong_checksum_is_refused(server, tmp_path, part):
    server.files["file"] = CONTENT[:-1] + b"\0"
    if part:
        (tmp_path / "file.part").write_bytes(part)
    with pytest.raises(DataError, match="SHA-256"):
        fetch(server.url("file"), tmp_path / "file", sha256(CONTENT))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_downloaded_is_named(server, tmp_path):
    with pytest.raises(DataError, match=re.escape(f"{server.url('absent')} could not be downloaded (HTTP Error 404")) as caught:
        fetch(server.url("absent"), tmp_path / "file", sha256(CONTENT))
    assert str(caught.value).endswith(f"put the file at {tmp_path / 'file'} by hand")
    server.server_close()
    with pytest.raises(DataError, match="could not be downloaded"):
        fetch(server.url("file"), tmp_path / "file", sha256(CONTENT))


def offer(server: Server, monkeypatch, name: str, files: dict[str, bytes]) -> None:
    """Let the local server provide the files of a data set, in place of the official one."""
    server.files |= files
    remotes = []
    for remote in SOURCES[name].remotes:
        file = urlsplit(remote.url).path.rpartition("/")[2]
        remotes.append(dataclasses.replace(remote, url=server.url(file), sha256=sha256(files[file])))
    monkeypatch.setitem(SOURCES, name, dataclasses.replace(SOURCES[name], remotes=tuple(remotes)))


def test_mnist_downloads_only_missing_files(server, monkeypatch, tmp_path):
    write_idx(tmp_path / "official", "mnist")
    files = {path.name: path.read_bytes() for path in (tmp_path / "official/MNIST/raw").iterdir()}
    offer(server, monkeypatch, "mnist", files)
    root = tmp_path / "root"
    mine = root / "MNIST/raw/t10k-images-idx3-ubyte"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(idx(images_of(3, 2, 4)))
    download("mnist", root)
    assert is_as_written(load("mnist", root), 2, 4)
    assert sorted(name for name, _ in server.asked) == sorted(set(files) - {"t10k-images-idx3-ubyte.gz"})
    download("mnist", root)
    assert len(server.asked) == 3


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


STRANGERS = {"../stranger": b"x", "gzip/stranger": b"x", "cifar-100-python/../../stranger": b"x", "/stranger": b"x"}


def test_emnist_is_unpacked_from_its_archive(server, monkeypatch, tmp_path):
    write_idx(tmp_path / "official", "emnist")
    members = {f"gzip/{path.name}": path.read_bytes() for path in (tmp_path / "official/EMNIST/raw").iterdir()}
    offer(server, monkeypatch, "emnist", {"gzip.zip": zipped(STRANGERS | members)})
    root = tmp_path / "below/root"
    download("emnist", root)
    assert {path.name for path in root.rglob("*") if path.is_file()} == {"gzip.zip", *(Path(name).name for name in members)}
    assert not list(tmp_path.rglob("stranger"))
    assert torch.equal(load("emnist", root).train_images.mT, torch.from_numpy(images_of(5, 3, 3)))


def test_cifar_is_unpacked_from_its_archive(server, monkeypatch, tmp_path):
    write_cifar(tmp_path / "official", python_2_pickle)
    (tmp_path / "official/cifar-100-python/meta").write_bytes(b"names")
    members = {f"cifar-100-python/{path.name}": path.read_bytes() for path in (tmp_path / "official/cifar-100-python").iterdir()}
    offer(server, monkeypatch, "cifar100", {"cifar-100-python.tar.gz": tarred(STRANGERS | members)})
    root = tmp_path / "below/root"
    download("cifar100", root)
    assert is_as_written(load("cifar100", root), 3, 2, 4)
    assert not list(tmp_path.rglob("stranger"))
    (root / "cifar-100-python/test").unlink()
    before = (root / "cifar-100-python/train").stat()
    download("cifar100", root)
    assert is_as_written(load("cifar100", root), 3, 2, 4)
    assert (root / "cifar-100-python/train").stat() == before
    assert len(server.asked) == 1


def test_wrong_or_incomplete_archives_are_refused(server, monkeypatch, tmp_path):
    offer(server, monkeypatch, "cifar100", {"cifar-100-python.tar.gz": tarred({"cifar-100-python/train": b"x"})})
    archive = tmp_path / "cifar-100-python.tar.gz"
    archive.write_bytes(b"mine")
    with pytest.raises(DataError, match=r"exists, but is not the file at .* move it away"):
        download("cifar100", tmp_path)
    assert archive.read_bytes() == b"mine"
    archive.unlink()
    with pytest.raises(DataError, match="has no file cifar-100-python/test"):
        download("cifar100", tmp_path)


def test_links_in_archives_are_refused(tmp_path):
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("link")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    with pytest.raises(DataError, match="has no file link"):
        data.unpack(tmp_path / "archive.tar.gz", {"link": tmp_path / "out"})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["mnist", "emnist", "cifar100"])
def test_downloaded_files_can_be_read(name):
    remotes = SOURCES[name].remotes
    assert all(re.fullmatch("[0-9a-f]{64}", remote.sha256) and remote.url.startswith("https://") for remote in remotes)

    def files(remote: Remote) -> set[str]:
        return {f"{remote.folder}/{Path(member).name}" for member in remote.members} or {remote.path}

    got = set().union(*map(files, remotes))
    read = {
        f"{start}{kind}"
        for start in SOURCES[name].files
        for kind in ([""] if name == "cifar100" else ["-images-idx3-ubyte.gz", "-labels-idx1-ubyte.gz"])
    }
    assert read <= got
