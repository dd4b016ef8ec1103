"""Published test sets, read by sacrebleu's own code from archives that are already here.

sacrebleu fetches an archive in one go, counts a truncated one as fetched the next time, and ends
the process when its hash is wrong. So archives come through download.py, and sacrebleu unpacks and
reads them in a folder of its own, which is removed: ``~/.sacrebleu`` is neither read nor written.
"""

import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from rope_fairseq.corpus.table import Wanted
from rope_fairseq.errors import UserError
from rope_fairseq.lines import count_lines


@dataclass(frozen=True)
class TestSet:
    """A test set of sacrebleu in one direction.

    Args:
        name: as sacrebleu says it: ``wmt14/full``.
        langpair: ``en-de``.
        archive: its path on the server, and the hash that sacrebleu knows.
    """

    __test__ = False  # for pytest: a class whose name begins with Test

    name: str
    langpair: str
    archive: Wanted


def published_test_set(name: str, source_lang: str, target_lang: str) -> TestSet:
    """Look up what sacrebleu knows of a test set that is one archive.

    Raises:
        UserError: sacrebleu has no such test set, or not in this direction.
    """
    from sacrebleu.dataset import DATASETS

    langpair = f"{source_lang}-{target_lang}"
    if name not in DATASETS or langpair not in DATASETS[name].langpairs:
        raise UserError(f"sacrebleu has no test set {name} for {langpair}")
    dataset = DATASETS[name]
    assert dataset.data is not None and dataset.md5 is not None
    (address,), (md5,) = dataset.data, dataset.md5
    return TestSet(name, langpair, Wanted(urlsplit(address).path.lstrip("/"), f"md5:{md5}"))


def write_test_set(test_set: TestSet, archive: Path, outputs: tuple[Path, Path], work: Path) -> int:
    """Write source and reference of a test set as sacrebleu gives them, one sentence a line.

    Args:
        archive: the verified archive, published or not.
        outputs: where the source and the reference go.
        work: a folder for sacrebleu, made and removed.

    Returns:
        The number of sentences.

    Raises:
        UserError: the archive is damaged, lacks the files, or they are not a test set.
    """
    from sacrebleu.dataset import DATASETS

    original = DATASETS[test_set.name]
    dataset: Any = type(original)(
        original.name, data=[archive.absolute().as_uri()], langpairs=original.langpairs
    )
    # Otherwise ~/.sacrebleu, where the text of a mirror would later pass for the published one.
    dataset._outdir = str(work)
    dataset._rawdir = str(work / "raw")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        with _no_member_leaves_its_folder():
            files = [dataset.get_source_file(test_set.langpair)]
            files += dataset.get_reference_files(test_set.langpair)
        counts = [count_lines(file) for file in files]
        if len(files) != 2 or counts[0] != counts[1] or not counts[0]:
            raise UserError(
                f"{archive}: {test_set.name} has {counts[0]:,} source sentences and "
                f"{counts[-1]:,} references"
            )
        for file, output in zip(files, outputs, strict=True):
            shutil.copyfile(file, output)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{archive}: damaged ({error}); get it again") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{archive}: {test_set.name} is not UTF-8 ({error.reason})") from None
    except FileNotFoundError as error:
        missing = os.path.relpath(error.filename, dataset._rawdir)
        raise UserError(f"{archive}: has no {missing}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return counts[0]


@contextmanager
def _no_member_leaves_its_folder() -> Iterator[None]:
    """sacrebleu unpacks whole archives; Python before 3.14 lets their members go anywhere."""
    data_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later have it
    # The documented class attribute; a plain function there would become a method.
    chosen = staticmethod(data_filter) if data_filter else None
    with mock.patch.object(tarfile.TarFile, "extraction_filter", chosen, create=True):
        yield
