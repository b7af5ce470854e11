"""The published files of the Spiking Heidelberg Digits and Spiking Speech Commands (Cramer et al. 2020).

The data are CC BY 4.0; download them from zenkelab.org/datasets.
"""

import functools
import gzip
import hashlib
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from adptnet._io.files import replace_file
from adptnet._io.untrusted import LimitedReader
from adptnet.errors import InputError
from adptnet.spec import suggest_name

__all__ = ["MD5", "find_split"]

MD5 = {  # as published beside the files
    "shd_train.h5.zip": "f3252aeb598ac776c1b526422d90eecb",
    "shd_test.h5.zip": "1503a5064faa34311c398fb0a1ed0a6f",
    "ssc_train.h5.zip": "d102be95e7144fcc0553d1f45ba94170",
    "ssc_valid.h5.zip": "b4eee3516a4a90dd0c71a6ac23a8ae43",
    "ssc_test.h5.zip": "a35ff1e9cffdd02a20eb850c17c37748",
    "shd_train.h5.gz": "d47c9825dee33347913e8ce0f2be08b0",
    "shd_test.h5.gz": "3062a80ec0c5719404d5b02e166543b1",
    "shd_train.h5": "8e9877c85f29a28dd353ea6a54402667",
    "shd_test.h5": "207ad1295a0ab611e22d1734989c254e",
}
SplitName = Literal["shd_train", "shd_test", "ssc_train", "ssc_valid", "ssc_test"]
SPLITS = ("shd_train", "shd_test", "ssc_train", "ssc_valid", "ssc_test")


def find_split(folder: str | Path, split: SplitName, *, verify: bool = True) -> Path:
    """Return the `.h5` file of a split in `folder`, after unpacking its `.zip` or `.gz` there if needed.

    Args:
        folder: Where the files are.
        split: "shd_train", "shd_test", "ssc_train", "ssc_valid" or "ssc_test".
        verify: Compare the file with its published MD5, once per process. None is published for the unpacked files of
            SSC or for its `.gz`, which are treated like any other untrusted file.

    Raises:
        InputError: The file is missing, cannot be unpacked, or its MD5 differs from the published one.
    """
    if split not in SPLITS:
        raise InputError(f"split={split!r} is unknown.{suggest_name(str(split), SPLITS)}")
    folder = Path(folder)
    target = folder / f"{split}.h5"
    if target.exists():
        if verify:
            _verify(target)
        return target
    for suffix in (".zip", ".gz"):
        archive = folder / f"{split}.h5{suffix}"
        if archive.exists():
            if verify:
                _verify(archive)
            _unpack(archive, target)
            return target
    raise InputError(
        f"{folder} has neither {target.name} nor {target.name}.zip or .gz. Download it from "
        f"https://zenkelab.org/datasets/{target.name}.zip (CC BY 4.0) into that folder."
    )


def _verify(path: Path) -> None:
    expected = MD5.get(path.name)
    if expected is None:
        return
    status = path.stat()
    found = _compute_md5(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if found != expected:
        raise InputError(
            f"{path} has the MD5 {found}, but {expected} was published: the download is damaged, or another release. "
            "Download it again, or pass verify=False."
        )


@functools.lru_cache(maxsize=16)
def _compute_md5(path: Path, *status: int) -> str:
    """Return the MD5 of a file, cached per `status` in memory, not in a file, which others could change."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _unpack(archive: Path, target: Path) -> None:
    """Unpack an archive atomically."""
    with replace_file(target) as draft:
        try:
            file = open(draft, "xb")  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"{archive} cannot be unpacked into its folder: {error.strerror}. Unpack it elsewhere."
            ) from None
        try:
            with file, _open_member(archive, target.name) as source:
                shutil.copyfileobj(LimitedReader(source, archive.stat().st_size), file, 1 << 20)
        except Exception as error:  # zipfile and gzip also raise errors of zlib and struct, RuntimeError, ...
            raise InputError(f"{archive} cannot be unpacked: {error}. Download it again.") from None


@contextmanager
def _open_member(archive: Path, name: str) -> Iterator[Any]:
    if archive.suffix == ".gz":
        with gzip.open(archive, "rb") as file:
            yield file
        return
    with zipfile.ZipFile(archive) as files:
        inside = [item for item in files.infolist() if Path(item.filename).name == name]
        if not inside:
            raise ValueError(f"it does not contain {name}")
        if inside[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("it uses a compression method other than deflate")
        with files.open(inside[0]) as member:
            yield member
