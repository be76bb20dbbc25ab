"""An HTTP server that speaks as SGLang 0.5.23 does and samples from the weights that it is given, with faults on order.

Responses are drawn by ``p3o_train.local_engine`` from a seed that depends on the weight version, the prompt, and how
many responses to it have been delivered: with one request at a time a run that was disturbed gets the same ones.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from p3o_train.config import TrainConfig
from p3o_train.hf_model import hf_config, transformers
from p3o_train.local_engine import LocalEngine
from p3o_train.recording import Request, Sampling

INFO = {"version": "0.5.23", "max_req_input_len": 4090, "sampling_mask_max_tokens": 4096}
Send = Callable[[int, bytes], None]


class Server:
    """Listens on a port of its own choice, which stays the same; ``fault`` says what becomes of /generate."""

    def __init__(self) -> None:
        self.fault = ""
        """One of ``tests.soak.servers``; empty: none."""
        self.until = 0
        """Answers of /generate that are sent before the fault."""
        self.met_at: float | None = None
        """When the fault was met first, by ``time.monotonic``."""
        self._version, self._engine = "0", None
        self._delivered: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._http: ThreadingHTTPServer | None = None
        self.port = 0
        LocalEngine(hf_config(TrainConfig().model_config(16)))  # or the first weights would wait for imports
        self.listen()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listen(self) -> None:
        """Comes (back) into being, without a fault."""
        self.fault, self.met_at = "", None
        self._released = threading.Event()
        if self._http is None:
            ThreadingHTTPServer.allow_reuse_address = True
            self._http = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
            self.port = self._http.server_port
            threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Ends; requests that wait are let go."""
        self._released.set()
        http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()

    def after(self, answers: int, fault: str) -> None:
        """The next ``answers`` of /generate are well, then the fault begins."""
        self.until, self.fault = answers, fault

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and content of everything but a fault."""
        if path == "/generate":
            return 200, self._generate(body)
        if path == "/update_weights_from_disk":
            from safetensors.torch import load_file

            folder = Path(body["model_path"])
            weights = load_file(folder / "model.safetensors")
            with self._lock:
                config = transformers().AutoConfig.from_pretrained(folder)
                self._engine = self._engine or LocalEngine(config)  # type: ignore[assignment]
                self._engine.update_weights(weights, int(body["weight_version"]))  # type: ignore[attr-defined]
                self._version = body["weight_version"]
            return 200, {"success": True, "message": "done"}
        known = {"/server_info": INFO, "/model_info": {"weight_version": self._version}}
        known |= {f"/{name}": {"status": "ok"} for name in ("pause_generation", "continue_generation", "abort_request")}
        return (200, known[path]) if path in known else (404, {"detail": "Not Found"})

    def _generate(self, body: Any) -> dict[str, Any]:
        knobs, prompt = body["sampling_params"], tuple(body["input_ids"])
        sampling = Sampling(knobs["max_new_tokens"], tuple(knobs["stop_token_ids"] or ()), knobs["temperature"])
        with self._lock:
            key = (self._version, prompt)
            seed = zlib.crc32(f"{key} {self._delivered[key]}".encode())
            (made,) = self._engine.generate([Request("asked", prompt, seed)], sampling)  # type: ignore[attr-defined]
            self._delivered[key] += 1
        tokens = list(made.token_ids)
        stopped = made.recording.finish_reason == "stop"
        return {
            "output_ids": tokens,
            "meta_info": {
                "id": body["rid"],
                "finish_reason": {"type": "stop", "matched": tokens[-1]}
                if stopped
                else {"type": "length", "length": len(tokens)},
                "output_token_logprobs": [[v, t, None] for v, t in zip(made.log_probs, tokens, strict=True)],
                "completion_tokens": len(tokens),
                "weight_version": key[0],
                "weight_versions": [{"version": key[0], "start": 0, "end": len(tokens)}],
            },
        }

    def faulty(self, handler: BaseHTTPRequestHandler) -> bool:
        """Meets a request to /generate with the fault, if it is time for it."""
        with self._lock:
            self.until -= 1
            if not self.fault or self.until >= 0:
                return False
            self.met_at = self.met_at or time.monotonic()
            fault = self.fault
            if fault == "answers 500 once":
                self.fault = ""
        if fault == "dies":
            # the listening socket as well: nobody is there for the next request
            threading.Thread(target=self.close, daemon=True).start()
        elif fault == "hangs":
            self._released.wait(120)
        elif fault.startswith("answers 500"):
            send(handler, 500, b'{"detail": "out of memory"}')
            return True
        elif fault == "sends garbage":
            send(handler, 200, b"\x00\xff<html>busy</html>")
            return True
        else:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            while fault == "trickles" and not self._released.wait(0.5):
                handler.wfile.write(b" ")
                handler.wfile.flush()
        handler.close_connection = True
        return True

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, body: Any) -> None:
                try:
                    if self.path != "/generate" or not server.faulty(self):
                        status, content = server.answer(self.path, body)
                        send(self, status, json.dumps(content).encode())
                except (BrokenPipeError, ConnectionResetError):  # whoever asked has given up
                    self.close_connection = True

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


def send(handler: BaseHTTPRequestHandler, status: int, content: bytes) -> None:
    """One whole answer."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)
