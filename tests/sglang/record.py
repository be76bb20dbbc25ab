"""Writes tests/data/sglang_0_5_23.json, the answers of a real server that tests without one replay.

P3O_SGLANG_PYTHON=... python -m tests.sglang.record
"""

import concurrent.futures
import json
import tempfile
import time
from pathlib import Path

from p3o_train.recording import Sampling
from p3o_train.sglang_wire import generate_body
from tests.sglang.reference import make_requests
from tests.sglang.server import make_model, running

TARGET = Path(__file__).parents[1] / "data" / "sglang_0_5_23.json"
# of more than 500 fields of the server
INFO = ("version", "max_req_input_len", "sampling_mask_max_tokens", "enable_deterministic_inference", "context_length")
# what an answer says of this machine and this hour
VOLATILE = ("e2e_latency", "response_sent_to_client_ts")


def generation(server, request, sampling, rid):
    body = generate_body(request, sampling, rid=rid)
    answer = server.post("/generate", **body)
    content = answer.json()
    for name in VOLATILE:
        content.get("meta_info", {}).pop(name, None)
    return {"body": body, "status": answer.status_code, "answer": content}


def record(server, paths):
    """Name -> request body, status and answer."""
    (request,) = make_requests((5,))
    short, long = Sampling(max_new_tokens=4, temperature=0.7), Sampling(max_new_tokens=300)
    found = {
        "scaled": generation(server, request, short, "scaled"),
        "stop": generation(server, request, Sampling(200, stop_token_ids=tuple(range(0, 512, 8))), "stop"),
        "truncated": generation(server, request, Sampling(4, top_k=5, top_p=0.3), "truncated"),
        "misspelt": generation(server, request, Sampling(4, other={"temp": 1.0}), "misspelt"),
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, sampling in (("partial", long), ("empty", long), ("versions", Sampling(max_new_tokens=150))):
            pending = pool.submit(generation, server, request, sampling, name)
            server.wait_for(1)
            # of a waiting request the server keeps multiples of 50 tokens
            time.sleep(0.0 if name == "empty" else 0.2)
            if name != "partial":
                server.post("/pause_generation", mode="retract")
            if name == "versions":
                found["change"] = change(server, paths[1], "1")
            else:
                server.post("/abort_request", rid=name)
            if name != "partial":
                server.post("/continue_generation")
            found[name] = pending.result()
    found["unknown_directory"] = change(server, Path("missing/weights"), "2")
    return found


def change(server, path, version):
    body = {"model_path": str(path), "weight_version": version, "flush_cache": True, "abort_all_requests": False}
    answer = server.post("/update_weights_from_disk", **body)
    return {"status": answer.status_code, "answer": answer.json()}


def main():
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / str(seed) for seed in range(2)]
        for seed, path in enumerate(paths):
            make_model(seed).save_pretrained(path)
        with running(paths[0], Path(directory) / "log.txt") as server:
            info = server.get("/server_info")
            found = {"server_info": {name: info[name] for name in INFO}} | record(server, paths)
    TARGET.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
