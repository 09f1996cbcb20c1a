"""An API like that of an LLM: it is slow, and refuses every seventh request with 429."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeApi(ThreadingHTTPServer):
    """Serves on a port of 127.0.0.1 in a thread, and counts its requests."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.lock = threading.Lock()
        self.requests = self.refused = self.open = self.most_open = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/complete"


class Handler(BaseHTTPRequestHandler):
    server: FakeApi

    def do_POST(self) -> None:
        api = self.server
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        with api.lock:
            api.requests += 1
            api.open += 1
            api.most_open = max(api.most_open, api.open)
            refuse = api.requests % 7 == 0
            api.refused += refuse
        if refuse:
            status, headers, answer = 429, {"Retry-After": "1"}, {"error": "too many requests"}
        else:
            time.sleep(0.3)  # it thinks
            status, headers, answer = 200, {}, {"text": f"an answer to {prompt!r}"}
        with api.lock:
            api.open -= 1
        body = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are counted, not logged."""
