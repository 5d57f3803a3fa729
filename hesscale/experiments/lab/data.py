"""Data sets: scikit-learn's digits, and MNIST, EMNIST and CIFAR-100 in torchvision's layout, which can be downloaded.

They are read from the given folder; otherwise from ``HESSCALE_DATA``; otherwise from ``data`` in the working directory.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import math
import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ..install import how_to_install
from .download import DataError as DataError
from .download import Progress, fetch, unpack
from .text import TEXTS, text_fingerprint

DIGITS_FOR_TRAINING = 1500  # the first of 1797
RECONSTRUCT = "numpy.core.multiarray._reconstruct"  # the function by which pickles create an array


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and their labels, in main memory.

    Attributes:
        name: its name in :func:`load`.
        train_images: bytes, as (images, rows, columns) or (images, 3, rows, columns).
        train_labels: int64, from 0 to classes − 1.
        test_images: as train_images.
        test_labels: as train_labels.
        classes: the number of classes.
        title: its name in figures.
        scale: the value of the brightest possible pixel.

    Example:
        >>> digits = load("digits")
        >>> digits.train_images.shape, digits.inputs("train").shape
        (torch.Size([1500, 8, 8]), torch.Size([1500, 64]))
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    title: str
    scale: int = 255

    def images(self, split: str) -> Tensor:
        """The images of ``"train"`` or ``"test"``."""
        return {"train": self.train_images, "test": self.test_images}[split]

    def labels(self, split: str) -> Tensor:
        return {"train": self.train_labels, "test": self.test_labels}[split]

    def inputs(self, split: str) -> Tensor:
        """Images as rows of float32 in [0, 1]."""
        return self.images(split).flatten(1).float() / self.scale


@dataclass(frozen=True)
class Remote:
    """A file to download."""

    url: str
    sha256: str
    path: str
    folder: str = ""  # members of an archive are unpacked to this folder
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """The files of a data set in the folder of data sets, and their expected contents."""

    title: str
    classes: int
    shape: tuple[int, ...]
    counts: tuple[int, int]
    files: tuple[str, str]  # for training and testing; for IDX files, prefixes of their names
    read: Callable[[Path, tuple[int, ...]], tuple[Tensor, Sequence[Any], Path]]
    remotes: tuple[Remote, ...] = ()


def names() -> list[str]:
    """The data sets that :func:`load` knows."""
    return ["digits", *SOURCES]


def folder(root: str | Path | None = None) -> Path:
    """The folder of data sets: ``root``, or ``HESSCALE_DATA``, or ``data`` below the working directory."""
    return Path(root or os.environ.get("HESSCALE_DATA") or "data").expanduser()


def load(name: str, root: str | Path | None = None) -> Dataset:
    """Read the data set of this name from its files in ``root``. Raises DataError if they are missing or not as expected."""
    if name == "digits":
        return digits()
    source = source_of(name)
    splits: list[Tensor] = []
    for count, file in zip(source.counts, source.files, strict=True):
        try:
            images, labels, path = source.read(folder(root) / file, (count, *source.shape))
            splits += [images, checked(labels, count, source.classes, path)]
        except (FileNotFoundError, NotADirectoryError) as missing:
            raise DataError(f"{missing.filename} does not exist; {advice(name, root)}") from None
        except DataError as error:
            raise DataError(f"{error}; remove it, and {advice(name, root)}") from None
    train_images, train_labels, test_images, test_labels = splits
    return Dataset(name, train_images, train_labels, test_images, test_labels, source.classes, source.title)


@functools.lru_cache
def fingerprint(name: str, root: str | Path | None = None) -> str:
    """A fingerprint that distinguishes data of the same name and shape."""
    if name in TEXTS:
        return text_fingerprint(name)
    found, digest = load(name, root), hashlib.sha256()
    for tensor in (found.train_images, found.train_labels, found.test_images, found.test_labels):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def source_of(name: str) -> Source:
    if name not in SOURCES:
        raise DataError(f"there is no data set {name!r}; choose one of {', '.join(names())}")
    return SOURCES[name]


def advice(name: str, root: str | Path | None) -> str:
    if SOURCES[name].remotes:
        todo = f"download it with `hesscale data {name} --data {folder(root)}`"
    else:
        todo = "put it there, since it cannot be downloaded"
    return f"{todo}, or set HESSCALE_DATA to the folder that has it"


def digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise DataError(f"digits come with scikit-learn: {how_to_install('experiments')}") from None
    bunch = load_digits()
    images = torch.as_tensor(bunch.images, device="cpu").to(torch.uint8)
    labels = torch.as_tensor(bunch.target, device="cpu").to(torch.int64)
    n = DIGITS_FOR_TRAINING
    return Dataset("digits", images[:n], labels[:n], images[n:], labels[n:], classes=10, title="digits", scale=16)


def checked(labels: Sequence[Any], count: int, classes: int, path: Path) -> Tensor:
    """Labels as a tensor. Raises DataError unless there are ``count`` labels and each is one of the classes."""
    if len(labels) != count:
        raise DataError(f"{path} has {len(labels)} labels, but should have {count}")
    strange = next((label for label in labels if type(label) is not int or not 0 <= label < classes), None)
    if strange is not None:
        raise DataError(f"{path} has a label {strange!r}, but labels should be 0 to {classes - 1}")
    return torch.tensor(labels, dtype=torch.int64, device="cpu")


def read_idx(start: Path, shape: tuple[int, ...]) -> tuple[Tensor, Sequence[int], Path]:
    """Images and labels from a pair of IDX files."""
    images, _ = read_idx_file(start.with_name(f"{start.name}-images-idx3-ubyte"), shape)
    labels, path = read_idx_file(start.with_name(f"{start.name}-labels-idx1-ubyte"), shape[:1])
    return images, labels.tolist(), path


def read_transposed_idx(start: Path, shape: tuple[int, ...]) -> tuple[Tensor, Sequence[int], Path]:
    """Images and labels from the IDX files of EMNIST, which store images transposed."""
    images, labels, path = read_idx(start, shape)
    return images.mT.contiguous(), labels, path


def read_idx_file(path: Path, shape: tuple[int, ...]) -> tuple[Tensor, Path]:
    """Read an IDX file, plain or .gz: 0, 0, 8 (for bytes), the number of dimensions, each size in four bytes, the values."""
    if not path.exists():
        path = path.with_name(f"{path.name}.gz")
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged ({error})") from None
    begin = 4 + 4 * len(shape)
    if content[:4] != bytes([0, 0, 8, len(shape)]) or len(content) < begin:
        raise DataError(f"{path} does not start like an IDX file of bytes in {len(shape)} dimensions")
    found = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, begin, 4))
    if found != shape:
        raise DataError(f"{path} claims to have {by(found)} values, but should have {by(shape)}")
    if len(content) != begin + math.prod(shape):
        raise DataError(f"{path} has {len(content)} bytes, but should have {begin + math.prod(shape)}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=begin).view(shape), path


def by(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


class Call:
    """A function call in a pickle, which is recorded but never executed."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]):
        self.name, self.args = name, args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class InertUnpickler(pickle.Unpickler):
    """Reads lists, dicts, numbers and text. Arrays become :class:`Call` objects. Everything else raises an error."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if full not in (RECONSTRUCT, "numpy.ndarray", "numpy.dtype", "_codecs.encode"):
            raise pickle.UnpicklingError(f"it asks for {full}, which images and labels do not need")
        return lambda *args: Call(full, args)


def read_cifar(path: Path, shape: tuple[int, ...]) -> tuple[Tensor, Sequence[Any], Path]:
    """Images and fine labels from a pickle that Python 2 (whose strings are bytes) or Python 3 wrote."""
    try:
        with path.open("rb") as file:
            batch = InertUnpickler(file, encoding="bytes").load()
        entries = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        images, labels = array(entries["data"]), list(entries["fine_labels"])
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{path} is damaged, or not a file of CIFAR-100 ({type(error).__name__}: {error})") from None
    expected = (shape[0], math.prod(shape[1:]))
    if images.shape != expected:
        raise DataError(f"{path} has {by(tuple(images.shape))} values, but should have {by(expected)}")
    return images.reshape(shape), labels, path


def array(call: Call) -> Tensor:
    """An array of bytes from numpy's pickled state: a version, shape, dtype, whether the order is Fortran's, and the content."""
    _, shape, kind, columns_first, content = call.state
    if isinstance(content, Call) and content.name == "_codecs.encode":  # Python 3 pickles bytes for Python 2 in this way
        text, encoding = content.args
        content = text.encode("latin1") if encoding == "latin1" else None
    is_of_bytes = call.name == RECONSTRUCT and kind.name == "numpy.dtype" and kind.args[0] in ("u1", b"u1")
    if not is_of_bytes or type(content) is not bytes or not content:
        raise ValueError("data is not an array of bytes")
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return values.view(shape[::-1]).T.contiguous() if columns_first else values.view(shape)


def download(name: str, root: str | Path | None = None, progress: Progress | None = None) -> None:
    """Download the missing files of a data set from the official source. Existing files are not changed.

    An interrupted download resumes. A file is moved to its path only after its checksum has been verified.
    """
    if name == "digits":
        return
    remotes = source_of(name).remotes
    if not remotes:
        raise DataError(f"{name} cannot be downloaded")
    for remote in remotes:
        path = folder(root) / remote.path
        targets = {member: folder(root) / remote.folder / PurePosixPath(member).name for member in remote.members}
        missing = {member: target for member, target in (targets or {"": path}).items() if not is_there(target)}
        if not missing:
            continue
        fetch(remote.url, path, remote.sha256, progress)
        if remote.members:
            unpack(path, missing)


def is_there(path: Path) -> bool:
    return path.exists() or (path.suffix == ".gz" and path.with_suffix("").exists())


MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
SOURCES = {
    "mnist": Source(
        "MNIST",
        classes=10,
        shape=(28, 28),
        counts=(60_000, 10_000),
        files=("MNIST/raw/train", "MNIST/raw/t10k"),
        read=read_idx,
        remotes=tuple(
            Remote(f"{MNIST}/{file}", sha256, f"MNIST/raw/{file}")
            for file, sha256 in {
                "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            }.items()
        ),
    ),
    "emnist": Source(
        "EMNIST (balanced)",
        classes=47,
        shape=(28, 28),
        counts=(112_800, 18_800),
        files=("EMNIST/raw/emnist-balanced-train", "EMNIST/raw/emnist-balanced-test"),
        read=read_transposed_idx,
        remotes=(
            Remote(
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
                "EMNIST/raw/gzip.zip",
                "EMNIST/raw",
                tuple(
                    f"gzip/emnist-balanced-{split}-{kind}-ubyte.gz"
                    for split in ("train", "test")
                    for kind in ("images-idx3", "labels-idx1")
                ),
            ),
        ),
    ),
    "emnist47": Source(
        "EMNIST-47 subset",
        classes=47,
        shape=(28, 28),
        counts=(35_720, 7_050),
        files=("EMNIST47/raw/emnist47-train", "EMNIST47/raw/emnist47-test"),
        read=read_transposed_idx,
    ),
    "cifar100": Source(
        "CIFAR-100",
        classes=100,
        shape=(3, 32, 32),
        counts=(50_000, 10_000),
        files=("cifar-100-python/train", "cifar-100-python/test"),
        read=read_cifar,
        remotes=(
            Remote(
                "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
                "cifar-100-python.tar.gz",
                "cifar-100-python",
                ("cifar-100-python/train", "cifar-100-python/test", "cifar-100-python/meta"),
            ),
        ),
    ),
}
