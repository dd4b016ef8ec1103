"""Downloads: resumed, checked, refused in one line; the server is on this machine."""

import contextlib
import fcntl
import hashlib
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rope_fairseq.corpus import download
from rope_fairseq.corpus.download import fetch, read_small
from rope_fairseq.corpus.table import Wanted, parse_table
from rope_fairseq.errors import UserError
from tests.corpora import small_disk as mounted_disk
from tests.serving import Server
from tests.tiny import ROOT

CONTENT = hashlib.shake_256(b"content").digest(300_000)
SIZE = len(CONTENT)
OTHER = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
PATH = "folder/file.tgz"


def checksum(content: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


WANTED = Wanted(PATH, checksum(CONTENT), SIZE)
UNSIZED = Wanted(PATH, checksum(CONTENT, "md5"))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between tries, and no proxy before the server on this machine."""
    monkeypatch.setattr(download, "DELAYS", (0, 0))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@contextlib.contextmanager
def serving(content: bytes = CONTENT, **settings) -> Iterator[Server]:
    with Server({f"/{PATH}": content}, **settings).running() as server:
        yield server


def ranges(server: Server) -> list[str | None]:
    return [asked for _, asked in server.requests]


def left(folder: Path) -> dict[str, bytes]:
    """What lies in the folder, without locks."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("wanted", [WANTED, UNSIZED], ids=["size and sha256", "md5 alone"])
@pytest.mark.parametrize("has_length", [True, False])
def test_a_file_is_fetched_once(wanted: Wanted, has_length: bool, tmp_path: Path) -> None:
    with serving(lengths=has_length) as server:
        for _ in range(2):
            assert fetch(server.base, wanted, tmp_path) == tmp_path / PATH
            assert left(tmp_path) == {PATH: CONTENT}
    assert ranges(server) == [None]


@pytest.mark.parametrize("wanted", [WANTED, UNSIZED], ids=["size and sha256", "md5 alone"])
def test_a_lost_connection_is_resumed_where_it_ended(wanted: Wanted, tmp_path: Path) -> None:
    # More losses than tries in a row: each one has brought something.
    with serving(drops=[1000, 70_000, 5, 100_000]) as server:
        fetch(server.base, wanted, tmp_path)
    starts = [1000, 71_000, 71_005, 171_005]
    assert ranges(server) == [None, *(f"bytes={start}-" for start in starts)]
    assert left(tmp_path) == {PATH: CONTENT}


def test_a_server_without_ranges_starts_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(ranges=False, drops=[1000, 2000]) as server:
        fetch(server.base, WANTED, tmp_path)
    assert ranges(server) == [None, "bytes=1000-", "bytes=2000-"]
    assert left(tmp_path) == {PATH: CONTENT}
    assert "the server does not resume; starting over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (CONTENT[:1234], ["bytes=1234-"]),
        (CONTENT, []),
        (b"", [None]),
        (CONTENT + b"more", [None]),
        (b"x" * 1234, ["bytes=1234-", None]),  # the hash shows that the beginning was another's
        (OTHER, [None]),
    ],
    ids=["beginning", "complete", "empty", "too long", "wrong beginning", "complete but wrong"],
)
def test_a_partial_file_is_gone_on_with_if_it_can_be(
    part: bytes, expected: list[str | None], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / f"{PATH}.part").write_bytes(part)
    with serving() as server:
        fetch(server.base, WANTED, tmp_path)
    assert ranges(server) == expected
    assert left(tmp_path) == {PATH: CONTENT}


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (CONTENT, [f"bytes={SIZE}-"]),
        (CONTENT + b"more", [f"bytes={SIZE + 4}-", None]),
    ],
    ids=["complete", "too long"],
)
def test_a_partial_file_of_unknown_size(
    part: bytes, expected: list[str | None], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / f"{PATH}.part").write_bytes(part)
    with serving() as server:
        fetch(server.base, UNSIZED, tmp_path)
    assert ranges(server) == expected
    assert left(tmp_path) == {PATH: CONTENT}


def test_a_file_that_was_spoiled_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / PATH).write_bytes(OTHER)
    with serving() as server:
        fetch(server.base, WANTED, tmp_path)
    assert left(tmp_path) == {PATH: CONTENT}


def test_a_passing_error_of_the_server_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(statuses=[503, 429]) as server:
        fetch(server.base, WANTED, tmp_path)
    assert len(server.requests) == 3
    assert ": HTTP 503 Service Unavailable; next try in 0 s\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "part", "requests", "message", "kept"),
    [
        (
            {"content": OTHER},
            None,
            1,
            f"its sha256 is {hashlib.sha256(OTHER).hexdigest()}, not {WANTED.checksum[7:]}: "
            "damaged or another file",
            None,
        ),
        ({"content": OTHER}, CONTENT[:99], 2, "its sha256 is ", None),
        (
            {"content": CONTENT + b"more"},
            None,
            1,
            "has 300,004 bytes, not 300,000: the server has another file",
            None,
        ),
        (
            {"content": CONTENT + b"more", "lengths": False},
            None,
            1,
            "has 300,004 bytes, not 300,000: damaged or another file",
            None,
        ),
        ({"statuses": [403]}, None, 1, "HTTP 403 Forbidden: the server does not give", None),
        (
            {"drops": [10, 0, 0]},
            None,
            3,
            "no connection (the connection ended after 10 of 300,000 bytes; 3 tries); check the",
            CONTENT[:10],
        ),
        (
            {"statuses": [500] * 9},
            CONTENT[:9],
            3,
            "no connection (HTTP 500 Internal Server Error; 3 tries)",
            CONTENT[:9],
        ),
        (
            {"content_range": "bytes 0-5/300000", "statuses": [None, 502, 502]},
            CONTENT[:9],
            3,
            "no connection (HTTP 502 Bad Gateway; 3 tries)",
            None,
        ),
    ],
    ids=[
        "wrong content",
        "wrong content, resumed",
        "wrong size",
        "wrong size, not announced",
        "refused",
        "nothing arrives any more",
        "server error",
        "wrong range",
    ],
)
def test_what_cannot_be_had_is_refused_and_never_gets_the_name(
    settings: dict,
    part: bytes | None,
    requests: int,
    message: str,
    kept: bytes | None,
    tmp_path: Path,
) -> None:
    (tmp_path / "folder").mkdir()
    if part is not None:
        (tmp_path / f"{PATH}.part").write_bytes(part)
    with serving(**settings) as server, pytest.raises(UserError) as error:
        fetch(server.base, WANTED, tmp_path)
    assert str(error.value).startswith(f"{server.base}/{PATH}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(server.requests) == requests
    # What has arrived of the right file stays, for the next run.
    assert left(tmp_path) == ({} if kept is None else {f"{PATH}.part": kept})


@pytest.mark.parametrize("small", [True, False])
def test_no_server_is_one_line(small: bool, tmp_path: Path) -> None:
    with serving() as server:
        base = server.base  # nobody listens there afterwards
    with pytest.raises(UserError, match=r"no connection \(Connection refused; 3 tries\); check"):
        read_small(base, PATH) if small else fetch(base, WANTED, tmp_path)


def test_a_certificate_that_is_not_accepted_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError(ssl.SSLCertVerificationError(1, "self-signed certificate"))

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(UserError, match="certificate is not accepted .*self-signed"):
        fetch("https://example.org", WANTED, tmp_path)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("/nowhere", "/nowhere: no such folder"),
        ("", "'': no such folder"),
        ("file:///nowhere", "file:///nowhere: no such folder"),
        ("ftp://example.org", "ftp://example.org: must be http://…, https://…, file:///… or a "),
        ("http:///path", "http:///path: must be http://…"),
        ("http://example.org:port", "http://example.org:port/folder/file.tgz: not an address ("),
        ("http://a b", "http://a b/folder/file.tgz: not an address ("),
    ],
)
def test_a_bad_address_is_refused(base: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        fetch(base, WANTED, tmp_path)
    assert str(error.value).startswith(message)
    assert not left(tmp_path)


def test_a_file_in_a_folder_is_checked_and_used_where_it_is(tmp_path: Path) -> None:
    mirror, downloads = tmp_path / "a mirror", tmp_path / "downloads"
    (mirror / "folder").mkdir(parents=True)
    with pytest.raises(UserError, match=f"{mirror}/{PATH}: no such file"):
        fetch(str(mirror), WANTED, downloads)
    (mirror / PATH).write_bytes(CONTENT)
    for base in (str(mirror), mirror.as_uri()):
        assert fetch(base, WANTED, downloads) == mirror / PATH
    (mirror / PATH).write_bytes(OTHER)
    with pytest.raises(UserError, match=f"{mirror}/{PATH}: its sha256 is"):
        fetch(str(mirror), WANTED, downloads)
    (mirror / PATH).write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match=f"{mirror}/{PATH}: has 299,999 bytes, not 300,000"):
        fetch(str(mirror), WANTED, downloads)
    assert not downloads.exists()


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
import without_fairseq
from pathlib import Path
from rope_fairseq.corpus.download import fetch
from rope_fairseq.corpus.table import Wanted
fetch(sys.argv[2], Wanted(sys.argv[3], sys.argv[4], int(sys.argv[5])), Path(sys.argv[6]))
assert "fairseq" not in sys.modules and "torch" not in sys.modules
"""


def test_a_killed_download_goes_on(tmp_path: Path) -> None:
    arguments = [PATH, WANTED.checksum, str(SIZE), str(tmp_path)]
    part = tmp_path / f"{PATH}.part"
    with serving(drops=[200_000], stalls=threading.Event()) as server:
        command = [sys.executable, "-c", KILLED, ROOT / "scripts", server.base, *arguments]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not part.exists() or part.stat().st_size < 50_000:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        arrived = part.stat().st_size
        finished = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    assert f" from byte {arrived:,} on\n" in finished.stderr
    assert ranges(server) == [None, f"bytes={arrived}-"]
    assert left(tmp_path) == {PATH: CONTENT}


def test_a_second_run_waits_for_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    with serving() as server, open(tmp_path / "folder/.file.tgz.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=fetch, args=(server.base, WANTED, tmp_path))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and not server.requests
        (tmp_path / PATH).write_bytes(CONTENT)  # the first run has it now
        fcntl.flock(lock, fcntl.LOCK_UN)
        thread.join(60)
    assert not thread.is_alive() and not server.requests
    assert "waiting for another run that fetches the same file" in capsys.readouterr().err


def test_without_a_terminal_progress_is_a_line_for_each_tenth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "BLOCK", 10_000)
    with serving() as server:
        fetch(server.base, WANTED, tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"fetching {server.base}/{PATH} (0.3 MB)"
    assert 2 <= len(lines) <= 11
    assert lines[-1] == "  0.3 MB of 0.3 MB"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 kB, if this user may mount one."""
    with mounted_disk(tmp_path / "disk", "200k"):
        yield tmp_path / "disk"


def test_a_disk_without_room_is_refused_before_the_download(small_disk: Path) -> None:
    with serving() as server, pytest.raises(UserError) as error:
        fetch(server.base, WANTED, small_disk)
    assert str(error.value).startswith(
        f"{small_disk}/{PATH}.part: no room for {server.base}/{PATH}"
    )
    assert "0.3 MB are still to come, 0.2 MB are free" in str(error.value)
    assert not server.requests


def test_a_disk_that_fills_up_is_named_and_the_download_goes_on_later(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 100_000)
    content = CONTENT[:150_000]
    wanted = Wanted(PATH, checksum(content))  # of unknown size: the disk fills on the way
    with serving(content=content) as server:
        with pytest.raises(OSError) as error:
            fetch(server.base, wanted, small_disk)
        assert error.value.filename == f"{small_disk}/{PATH}.part"
        assert os.strerror(error.value.errno) == "No space left on device"
        ballast.unlink()
        fetch(server.base, wanted, small_disk)
    assert ranges(server)[-1] is not None
    assert left(small_disk) == {PATH: content}


def test_a_small_file_is_read_or_absent(tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(b"content")
    with Server.of_folder(tmp_path).running() as server:
        for base in (server.base, f"{server.base}/", str(tmp_path), tmp_path.as_uri()):
            assert read_small(base, "table") == b"content"
            assert read_small(base, "nothing") is None
            with pytest.raises(UserError, match="its table is over 6 bytes"):
                read_small(base, "table", limit=6)
        server.statuses = [500, 429]
        assert read_small(server.base, "table") == b"content"
        server.statuses = [401]
        with pytest.raises(UserError, match=f"{server.base}/table: HTTP 401 Unauthorized"):
            read_small(server.base, "table")


SHA = "sha256:" + 64 * "0"


def test_a_table_of_files() -> None:
    text = f"# comment\na/b-c_1.tgz\t12\t{SHA}\n\nd\t-\tmd5:{32 * 'f'}\n"
    assert parse_table(text, "table") == {
        "a/b-c_1.tgz": Wanted("a/b-c_1.tgz", SHA, 12),
        "d": Wanted("d", "md5:" + 32 * "f"),
    }


@pytest.mark.parametrize(
    "line",
    [
        "<!DOCTYPE html>",
        f"a 12 {SHA}",
        f"a\t12\t{SHA[:-1]}",
        "a\t12\tsha1:" + 40 * "0",
        f"a\t-12\t{SHA}",
        f"/etc/a\t12\t{SHA}",
        f"a/../../b\t12\t{SHA}",
        f"a//b\t12\t{SHA}",
        f"first\t1\t{SHA}",
        f"a\t12\t{SHA}\r",
    ],
)
def test_a_line_that_is_no_entry_is_refused_by_its_number(line: str) -> None:
    with pytest.raises(UserError, match="^table:2: '.*' is not a file's path, size in bytes and"):
        parse_table(f"first\t1\t{SHA}\n{line}\n", "table")
