"""Downloads that verify the checksum and resume where an earlier attempt stopped."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from .files import write_whole

Progress = Callable[[str, int, "int | None"], None]  # the file, bytes done, and total bytes if the server reports them

CHUNK = 1 << 20
TIMEOUT = 60  # seconds without a byte


class DataError(RuntimeError):
    """A data set is missing or damaged, or cannot be downloaded. The message names the file and says what to do."""


def fetch(url: str, path: Path, sha256: str, progress: Progress | None = None) -> None:
    """Download a file with this checksum. Resumes from the partial file of an earlier attempt."""
    if path.exists():
        if digest(path) != sha256:
            raise DataError(f"{path} exists, but is not the file at {url}: its SHA-256 is not {sha256}; move it away")
        return
    part = path.with_name(f"{path.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        transfer(url, part, progress or (lambda *_: None))
    except (OSError, HTTPException) as error:
        kept = f"run the same command to resume the download from {part}, or " if part.exists() else ""
        raise DataError(f"{url} could not be downloaded ({error}); {kept}put the file at {path} by hand") from None
    found = digest(part)
    if found != sha256:
        part.unlink()
        raise DataError(f"{url} sent a file whose SHA-256 is {found} and not {sha256}; the file was deleted, so try again later")
    write_whole(path, part.rename)


def transfer(url: str, part: Path, progress: Progress) -> None:
    """Append the missing bytes to ``part``."""
    done = part.stat().st_size if part.exists() else 0
    request = Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        with error:
            if error.code == 416 and done:  # the partial file is already complete
                return
            raise
    with response:
        goes_on = response.status == 206
        done = done if goes_on else 0
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with part.open("ab" if goes_on else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                progress(part.stem, done, total)
    if total is not None and done != total:
        raise OSError(f"only {done} of {total} bytes arrived")


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def unpack(archive: Path, targets: dict[str, Path]) -> None:
    """Extract these members of a tar or zip archive, and no others, to the given paths."""
    with ExitStack() as stack:
        content: Callable[[str], IO[bytes] | None]
        if archive.suffix == ".zip":
            content = stack.enter_context(zipfile.ZipFile(archive)).open
        else:
            content = stack.enter_context(tarfile.open(archive)).extractfile
        for member, target in targets.items():
            try:
                source = content(member)
            except KeyError:
                source = None
            if source is None:
                raise DataError(f"{archive} has no file {member}")
            with source:
                write_whole(target, lambda path, source=source: copy(source, path))  # type: ignore[misc]


def copy(source: IO[bytes], path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(source, file)
