"""Files are written whole or not at all."""

import os
import threading

import pytest

from rope_fairseq.errors import UserError
from rope_fairseq.files import replacing


def write(path, content=b"new"):
    with replacing(path) as file:
        file.write(content)


def test_a_file_is_replaced_with_the_usual_permissions_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    (tmp_path / "a.tmp").write_bytes(b"the user's own")
    write(path)
    assert path.read_bytes() == b"new"
    assert (tmp_path / "a.tmp").read_bytes() == b"the user's own"
    assert sorted(os.listdir(tmp_path)) == ["a", "a.tmp"]
    assert path.stat().st_mode == (tmp_path / "a.tmp").stat().st_mode


def test_an_error_leaves_the_old_content(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"


def test_a_pipe_and_a_device_are_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write(pipe)
    reader.join()
    assert read == [b"new"] and pipe.is_fifo()
    write(os.devnull)
    assert not os.path.isfile(os.devnull)


def test_a_folder_and_a_missing_folder_are_refused_by_their_own_names(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        write(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        write(tmp_path / "none" / "a")
    assert error.value.filename == str(tmp_path / "none" / "a")
