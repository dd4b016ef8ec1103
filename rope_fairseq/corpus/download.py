"""Files from a server or a folder: checked by size and hash, resumed where they were cut off.

A file that is being fetched is called ``NAME.part``; it gets its name only when its size and its
hash are right, so a file under its own name is whole. The hash is computed anew each time: reading
1.6 GB takes seconds, and nothing that was noted earlier has to be believed. Of a file without a
published hash the size alone is checked; whoever reads it must see whether it is damaged.
"""

import fcntl
import hashlib
import http.client
import os
import re
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from rope_fairseq.corpus.table import Wanted
from rope_fairseq.errors import UserError

# Seconds before each further try; the count starts anew whenever bytes have arrived.
DELAYS = (1, 2, 4, 8)
# Seconds without a byte after which a connection counts as lost.
TIMEOUT = 60
BLOCK = 1 << 18
# HTTP statuses that may pass by themselves; others are final.
PASSING = {408, 425, 429, 500, 502, 503, 504}


class _LostError(Exception):
    """The connection failed or ended early: worth another try, unless the reason is for ever."""

    def __init__(self, reason: object) -> None:
        # The system's words, without the error's number.
        super().__init__(getattr(reason, "strerror", None) or str(reason) or type(reason).__name__)
        self.reason = reason


def megabytes(size: int) -> str:
    """``657.6 MB``; small files in bytes."""
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size:,} bytes"


def local_folder(base: str) -> Path | None:
    """The folder that a base address names: a plain path or ``file://``; None for a server.

    Raises:
        UserError: it is neither a folder that exists nor ``http(s)://SERVER…``.
    """
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", base):
        folder = Path(base)
    else:
        address = urllib.parse.urlsplit(base)
        if address.scheme in ("http", "https") and address.netloc:
            return None
        if address.scheme != "file" or address.netloc not in ("", "localhost"):
            raise UserError(f"{base}: must be http://…, https://…, file:///… or a folder")
        folder = Path(urllib.parse.unquote(address.path))
    if not base or not folder.is_dir():
        raise UserError(f"{base or repr(base)}: no such folder")
    return folder


def address_of(base: str, path: str) -> str:
    """The address of the file ``path`` below the server ``base``."""
    return f"{base.rstrip('/')}/{urllib.parse.quote(path)}"


def read_small(base: str, path: str, limit: int = 1 << 20) -> bytes | None:
    """The content of a small file below ``base``; None if there is no such file.

    Raises:
        UserError: the server cannot be reached, refuses, or the file is over ``limit`` bytes.
    """
    folder = local_folder(base)
    if folder is not None:
        try:
            with open(folder / path, "rb") as file:
                content = file.read(limit + 1)
        except FileNotFoundError:
            return None
    else:
        address = address_of(base, path)
        lost = 0
        while True:
            try:
                with _open(address, 0) as response:
                    content = response.read(limit + 1)
                break
            except urllib.error.HTTPError as error:
                if error.code in (403, 404, 410):
                    return None
                reason = f"HTTP {error.code} {error.reason}"
                if error.code not in PASSING:
                    raise UserError(f"{address}: {reason}") from None
                lost = _wait(address, _LostError(reason), lost)
            except (OSError, http.client.HTTPException) as error:
                lost = _wait(address, _LostError(error), lost)
            except _LostError as error:
                lost = _wait(address, error, lost)
    if len(content) > limit:
        raise UserError(f"{base}: its {path} is over {limit:,} bytes: not such a table")
    return content


def fetch(base: str, wanted: Wanted, downloads: Path) -> Path:
    """A verified file: in place if ``base`` is a folder, else fetched into ``downloads``.

    Args:
        base: ``http(s)://SERVER…``, ``file:///FOLDER`` or a folder.
        wanted: which file below ``base``, and what it must be.
        downloads: folder for what comes from a server, under the same path. A file that is there
            already and right is not fetched again.

    Returns:
        The path of a file that has the wanted size and hash, as far as they are known.

    Raises:
        UserError: the file is another one, cannot be had, or there is no room for it.
        OSError: ``downloads`` cannot be written to.
    """
    folder = local_folder(base)
    if folder is not None:
        _verify(folder / wanted.path, wanted, str(folder / wanted.path))
        return folder / wanted.path
    target = downloads / wanted.path
    address = address_of(base, wanted.path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock")):
        if target.exists():
            try:
                _verify(target, wanted, str(target))
            except UserError as error:
                print(f"{error}; fetching it again", file=sys.stderr, flush=True)
            else:
                return target
        part = target.with_name(f"{target.name}.part")
        _fetch_part(address, wanted, part)
        os.replace(part, target)
    return target


def _fetch_part(address: str, wanted: Wanted, part: Path) -> None:
    """Bring ``part`` to the wanted content, going on from what it holds."""
    resumed = part.exists() and part.stat().st_size > 0
    if resumed and wanted.size is not None and part.stat().st_size > wanted.size:
        part.unlink()  # what is longer than it may be cannot be a beginning
        resumed = False
    while True:
        _receive(address, wanted, part)
        try:
            _verify(part, wanted, address)
            return
        except UserError as error:
            part.unlink()
            if not resumed:
                raise
            # The beginning may be that of another version of the file.
            print(f"{error}; starting over", file=sys.stderr, flush=True)
            resumed = False


def _receive(address: str, wanted: Wanted, part: Path) -> None:
    """Receive what ``part`` lacks, over as many connections as it takes."""
    lost = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        if before and before == wanted.size:
            return
        _check_room(address, wanted, part, before)
        try:
            _receive_once(address, wanted, part, before)
            return
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:
                # No byte after those we have: the file ends here, or is a shorter one.
                if error.headers.get("Content-Range") == f"bytes */{before}":
                    return
                part.unlink()
                continue
            if error.code not in PASSING:
                raise UserError(
                    f"{address}: HTTP {error.code} {error.reason}: the server does not give this "
                    "file; try another one with --mirror"
                ) from None
            reason = _LostError(f"HTTP {error.code} {error.reason}")
        except _LostError as error:
            reason = error
        arrived = part.exists() and part.stat().st_size > before
        lost = _wait(address, reason, 0 if arrived else lost)


def _wait(address: str, error: _LostError, lost: int) -> int:
    """Wait before another try, or give up.

    Args:
        lost: connections lost before this one, since bytes have last arrived.

    Returns:
        The same with this one.

    Raises:
        UserError: it was the last, or the reason is one that does not pass.
    """
    text = " ".join(str(error).split())
    if isinstance(error.reason, ssl.SSLCertVerificationError):
        raise UserError(f"{address}: the server's certificate is not accepted ({text})")
    if lost >= len(DELAYS):
        raise UserError(
            f"{address}: no connection ({text}; {lost + 1} tries); check the network and run it "
            "again to go on, or name another server or a folder with --mirror"
        )
    print(f"{address}: {text}; next try in {DELAYS[lost]} s", file=sys.stderr, flush=True)
    time.sleep(DELAYS[lost])
    return lost + 1


def _open(address: str, offset: int) -> http.client.HTTPResponse:
    """A response to the request for the file from byte ``offset`` on."""
    headers = {"User-Agent": "rope_fairseq", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    try:
        request = urllib.request.Request(address, headers=headers)
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
        return response
    except urllib.error.HTTPError:
        raise
    except (http.client.InvalidURL, ValueError) as error:
        raise UserError(f"{address}: not an address ({error})") from None
    except urllib.error.URLError as error:
        raise _LostError(error.reason) from None
    except (OSError, http.client.HTTPException) as error:
        raise _LostError(error) from None


def _receive_once(address: str, wanted: Wanted, part: Path, offset: int) -> None:
    """One connection: append to ``part``, or write it anew if the server gives no ranges.

    Raises:
        _LostError: the connection ended before the file did.
        UserError: the server has a file of another size.
        urllib.error.HTTPError: the server refuses.
    """
    with _open(address, offset) as response:
        if response.status == 206:
            match = re.fullmatch(
                r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "")
            )
            if not match or int(match[1]) != offset:
                part.unlink(missing_ok=True)
                raise _LostError("the server gave another part of the file than was asked for")
            total = None if match[2] == "*" else int(match[2])
        else:
            if offset:
                print(f"{address}: the server does not resume; starting over", file=sys.stderr)
            offset = 0
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
        if None not in (total, wanted.size) and total != wanted.size:
            raise UserError(
                f"{address}: has {total:,} bytes, not {wanted.size:,}: the server has another file"
            )
        end = wanted.size if wanted.size is not None else total
        with _Progress(address, offset, end) as progress:
            try:
                with open(part, "r+b" if offset else "wb") as file:
                    file.seek(offset)
                    for block in _blocks(response):
                        file.write(block)
                        file.flush()  # what has arrived outlives a kill
                        progress.add(len(block))
                        if end is not None and progress.received > end:
                            break
            except OSError as error:
                # A full disk says no name by itself.
                raise OSError(error.errno, error.strerror, str(part)) from None
        if end is not None and progress.received < end:
            raise _LostError(f"the connection ended after {progress.received:,} of {end:,} bytes")


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The bytes of a response as they come."""
    while True:
        try:
            block = response.read1(BLOCK)
        except (OSError, http.client.HTTPException) as error:
            raise _LostError(error) from None
        if not block:
            return
        yield block


class _Progress:
    """How far a file is: a bar on a terminal, else a plain line at every tenth of it."""

    def __init__(self, address: str, offset: int, total: int | None) -> None:
        self.address, self.received, self.total = address, offset, total
        label = address.rsplit("/", 1)[-1]
        self.bar = (
            tqdm(total=total, initial=offset, desc=label, unit="B", unit_scale=True)
            if sys.stderr.isatty()
            else None
        )
        self.step = max((total or 0) // 10, 50_000_000 if total is None else 1)
        self.next = (offset // self.step + 1) * self.step

    def __enter__(self) -> "_Progress":
        size = "" if self.total is None else f" ({megabytes(self.total)})"
        start = f" from byte {self.received:,} on" if self.received else ""
        print(f"fetching {self.address}{size}{start}", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def add(self, count: int) -> None:
        self.received += count
        if self.bar is not None:
            self.bar.update(count)
        elif self.received >= self.next:
            of = "" if self.total is None else f" of {megabytes(self.total)}"
            print(f"  {megabytes(self.received)}{of}", file=sys.stderr, flush=True)
            self.next = (self.received // self.step + 1) * self.step


def _check_room(address: str, wanted: Wanted, part: Path, have: int) -> None:
    """Refuse a file for which the disk has no room, before an hour has gone into it."""
    free = shutil.disk_usage(part.parent).free
    if wanted.size is not None and wanted.size - have > free:
        raise UserError(
            f"{part}: no room for {address}: {megabytes(wanted.size - have)} are still to come, "
            f"{megabytes(free)} are free; make room or name another folder with --downloads"
        )


def _verify(path: Path, wanted: Wanted, name: str) -> None:
    """Raise UserError unless the file has the wanted size and hash, as far as they are known;
    ``name`` is for the message."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{name}: no such file") from None
    if wanted.size is not None and size != wanted.size:
        raise UserError(f"{name}: has {size:,} bytes, not {wanted.size:,}: damaged or another file")
    if wanted.checksum is None:
        return
    algorithm, _, expected = wanted.checksum.partition(":")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise UserError(
            f"{name}: its {algorithm} is {found}, not {expected}: damaged or another file"
        )


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """One process at a time: a second one waits and then finds the file."""
    with open(lock, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"{lock.parent}: waiting for another run that fetches the same file",
                file=sys.stderr,
                flush=True,
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
