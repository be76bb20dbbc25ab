"""A tiny random Qwen2 and a real SGLang server for it, on the CPU, in the environment of another Python."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

STUBS = Path(__file__).parent / "stubs"
CPU_ENVIRONMENT = {"PYTHONPATH": str(STUBS), "SGLANG_USE_CPU_ENGINE": "1"}
VOCABULARY = 512
CONTEXT = 8192
# of the server, over all requests; fewer than the context
MAX_TOKENS = 4096
# imports take most of 20 s on two idle cores
START_S = 240.0


def server_python() -> str:
    """The Python whose environment has sglang; the tests of this folder are skipped without."""
    return os.environ.get("P3O_SGLANG_PYTHON", "")


def make_model(seed: int) -> Any:
    """Qwen2 with two layers; weights five times as large as usual, so that attention is far from uniform."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
    )
    return Qwen2ForCausalLM(config).eval()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """One running server; its processes form a group, which ends together."""

    def __init__(self, model_path: Path, log: Path, **variables: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [server_python(), "-m", "sglang.launch_server", "--model-path", str(model_path), "--device", "cpu"]
        command += ["--attention-backend", "torch_native", "--dtype", "float32", "--mem-fraction-static", "0.2"]
        command += ["--max-total-tokens", str(MAX_TOKENS), "--skip-tokenizer-init", "--weight-version", "0"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        environment = inherited | CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1"} | variables
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def wait(self) -> None:
        """Returns once the server answers."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=30, trust_env=False).status_code == 200:
                    return
            time.sleep(0.5)
        tail = self._log.read_text(errors="replace")[-4000:]
        raise RuntimeError(f"the server did not start within {START_S:g} s, its log ends with:\n{tail}")

    def wait_for(self, requests: int) -> None:
        """Returns once this many are being sampled."""
        end = time.monotonic() + START_S
        while self.get("/v1/loads")["loads"][0]["num_running_reqs"] != requests:
            assert time.monotonic() < end, "the requests never ran"
            time.sleep(0.02)

    def is_alive(self) -> bool:
        return httpx.get(f"{self.url}/health", timeout=30, trust_env=False).status_code == 200

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=120, trust_env=False).json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, trust_env=False)

    def kill(self) -> None:
        """Ends all processes of the server at once, as a crash of the machine would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def running(model_path: Path, log: Path, **variables: str) -> Iterator[Server]:
    """A server that answers, with these variables in its environment; killed at the end, whatever happens."""
    server = Server(model_path, log, **variables)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def in_server_environment(code: str) -> str:
    """What ``code`` prints under the server's Python."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [server_python(), "-c", code],
        env=environment | CPU_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr + sys.executable
    return done.stdout
