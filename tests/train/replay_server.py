"""A small HTTP server that answers as SGLang 0.5.23 did, and otherwise as a test says."""

import copy
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from p3o_train.recording import Request, Sampling

SAMPLING = Sampling(max_new_tokens=4, temperature=0.7)
"""Of the recorded response."""
RECORDED = json.loads((Path(__file__).parents[1] / "data" / "sglang_0_5_23.json").read_text())


class ReplayServer:
    """Answers with recorded JSON and notes every call; ``script`` takes what to answer instead, by path."""

    def __init__(self):
        self.calls = []
        """(path, body) in the order of arrival."""
        self.script = {}
        """Path -> list of (status, content) that are answered first, in order; a function writes to the handler."""
        self.info = RECORDED["server_info"]
        self.version = "0"
        self.gate = threading.Event()
        """/generate waits for it."""
        self.gate.set()
        self.peak = self._inside = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self.gate.set()
        self._http.shutdown()
        self._http.server_close()

    def bodies(self, path):
        return [body for called, body in self.calls if called == path]

    def wait_for_calls(self, path, count):
        end = time.monotonic() + 20
        while len(self.bodies(path)) < count:
            assert time.monotonic() < end, self.calls
            time.sleep(0.005)

    def answer(self, path, body):
        """(status, content) as the real server gave them."""
        with self._lock:
            self.calls.append((path, body))
            if self.script.get(path):
                return self.script[path].pop(0)
        if path == "/generate":
            return self._generate(body)
        if path == "/update_weights_from_disk":
            self.version = body["weight_version"]
            return 200, RECORDED["change"]["answer"]
        answers = {
            "/server_info": self.info,
            "/model_info": {"weight_version": self.version},
            "/pause_generation": {"status": "ok"},
            "/continue_generation": {"status": "ok"},
            "/abort_request": None,
        }
        return (200, answers[path]) if path in answers else (404, {"detail": "Not Found"})

    def _generate(self, body):
        with self._lock:
            self._inside += 1
            self.peak = max(self.peak, self._inside)
        version = self.version
        self.gate.wait(30)
        time.sleep(0.01)
        content = copy.deepcopy(RECORDED["scaled"]["answer"])
        content["meta_info"] |= {"id": body["rid"], "weight_version": version}
        content["meta_info"]["weight_versions"][0]["version"] = version
        with self._lock:
            self._inside -= 1
        return 200, content

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.reply(*server.answer(self.path, None))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(*server.answer(self.path, body))

            def reply(self, status, content):
                if callable(content):
                    content(self)
                    self.close_connection = True
                    return
                data = (
                    content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
                )
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, *args):
                pass

        return Handler


def make_requests(count):
    return [Request(f"r{index}", (index + 1, 7), index) for index in range(count)]


def in_background(call):
    outcome = []

    def run():
        try:
            outcome.append(call())
        except RuntimeError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome
