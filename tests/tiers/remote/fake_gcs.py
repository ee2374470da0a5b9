"""The part of GCS's XML interface that obstore uses, in memory: HEAD, GET, lists, conditional PUT, DELETE."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

# As tests/tiers/servers.py has it, which a process of its own does not import.
DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    buckets = ("bucket",)

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.pop("length", str(len(body))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def name(self):
        """Return the path of the object; answer and return None if its bucket does not exist."""
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if path.split("/")[0] in self.buckets:
            return path
        self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        return None

    def found(self):
        name = self.name()
        if name is None:
            return None
        content = self.server.objects.get(name)
        if content is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        return content

    def about(self, content):
        return {
            "ETag": f'"{md5(content).hexdigest()}"',
            "Last_Modified": formatdate(usegmt=True),
            "x_goog_generation": "1",
        }

    def do_HEAD(self):
        content = self.found()
        if content is not None:
            self.send_response(200)
            for name, value in self.about(content).items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()

    def list_objects(self, query):
        """Answer with the objects of a prefix, two on a page."""
        begin = f"bucket/{query['prefix'][0]}"
        after = query.get("continuation-token", [""])[0]
        names = sorted(name for name in self.server.objects if name.startswith(begin) and name > after)
        entry = "<Contents><Key>{}</Key><Size>1</Size><LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
        listed = "".join(entry.format(name.removeprefix("bucket/")) for name in names[:2])
        if len(names) > 2:
            listed += f"<NextContinuationToken>{names[1]}</NextContinuationToken>"
        self.answer(200, f"<ListBucketResult>{listed}</ListBucketResult>".encode())

    def do_GET(self):
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self.list_objects(query)
            return
        content = self.found()
        if content is None:
            return
        wanted = self.headers.get("Range")
        if wanted is None:
            self.answer(200, content, **self.about(content))
            return
        first, last = wanted.removeprefix("bytes=").split("-")
        begin, end = int(first), min(len(content), int(last) + 1 if last else len(content))
        if begin >= len(content):
            self.answer(416, Content_Range=f"bytes */{len(content)}")
            return
        place = {"Content_Range": f"bytes {begin}-{end - 1}/{len(content)}"}
        self.answer(206, content[begin:end], **self.about(content), **place)

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.name()
        if name is None:
            return
        with self.server.lock:
            is_refused = self.headers.get("x-goog-if-generation-match") == "0" and name in self.server.objects
            if not is_refused:
                self.server.objects[name] = content
        if is_refused:
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            self.answer(200, **self.about(content))

    def do_DELETE(self):
        name = self.name()
        if name is not None:
            self.answer(404 if self.server.objects.pop(name, None) is None else 204)


@contextmanager
def fake_gcs():
    """Run a server with the bucket "bucket" in a process of its own, which ends with this one; yield its URL."""
    command = [*DIE_WITH_PARENT, sys.executable, str(Path(__file__))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.objects, server.lock = {}, threading.Lock()
    print(server.server_port, flush=True)
    server.serve_forever()
