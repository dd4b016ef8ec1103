"""A server on this machine whose faults a test chooses."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Server:
    """What is served, how badly, and what was asked for.

    Args:
        files: path with its ``/`` → content.
        ranges: answer ``Range``, as servers of large files do.
        lengths: say how long the answer is.
        drops: for each request that is answered with content, in turn, after how many bytes the
            connection is cut (None: not at all). Requests after the last entry are not cut.
        statuses: for each request, in turn, an error to answer with instead (None: no error).
        content_range: a false Content-Range for answers with a part of the file.
        stalls: after a cut, wait for this event before the connection ends.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    lengths: bool = True
    drops: list[int | None] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    content_range: str | None = None
    stalls: threading.Event | None = None
    base: str = ""
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    @classmethod
    def of_folder(cls, folder: Path) -> "Server":
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return cls({f"/{path.relative_to(folder)}": path.read_bytes() for path in paths})

    @contextmanager
    def running(self) -> Iterator["Server"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        self.base = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            if self.stalls is not None:
                self.stalls.set()
            server.shutdown()
            server.server_close()


def _handler(settings: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            settings.requests.append((self.path, asked))
            content = settings.files.get(self.path)
            status = settings.statuses.pop(0) if settings.statuses else None
            if status is not None or content is None:
                self.send_error(status or 404)
                return
            start = 0
            match = re.fullmatch(r"bytes=(\d+)-", asked or "")
            if match and settings.ranges:
                start = int(match[1])
                if start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.end_headers()
                    return
                self.send_response(206)
                true_range = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self.send_header("Content-Range", settings.content_range or true_range)
            else:
                self.send_response(200)
            if settings.lengths:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            cut = settings.drops.pop(0) if settings.drops else None
            self.wfile.write(content[start:] if cut is None else content[start : start + cut])
            self.wfile.flush()
            if cut is not None and settings.stalls is not None:
                settings.stalls.wait(60)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
