"""A SavedModel over HTTP by TensorFlow and TensorFlow Text alone, in TensorFlow Serving's form.

    keras-aiayn export run/model.keras --format saved_model --output folder
    python examples/serve/saved_model.py folder --name translator --port 8501
    curl -d '{"instances": ["A dog runs."]}' localhost:8501/v1/models/translator:predict

answers {"predictions": [{"translations", "scores", "hit_limit"} of each text]} or {"error"}. The
texts of a request are one batch, and one is translated at a time.
"""

import argparse
import http.server
import json

import tensorflow as tf
import tensorflow_text  # noqa: F401  (it knows the operations of the tokenizers)

MOST_BYTES, MOST_TEXTS, LONGEST = 1_000_000, 64, 1_000  # of a request; characters of a text


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers a request; the server has `path` and `model`."""

    timeout = 10  # seconds for a client that sends nothing: others wait

    def do_POST(self) -> None:
        """Translates."""
        try:
            status, content = 404, {"error": f"there is only {self.server.path}"}
            if self.path == self.server.path:
                status, content = 200, {"predictions": self.predictions(self.texts())}
        except (ValueError, RecursionError) as error:
            status, content = 400, {"error": str(error)}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def texts(self) -> list[str]:
        """What is asked for."""
        length = int(self.headers.get("Content-Length", 0))
        asked = json.loads(self.rfile.read(length)) if 0 < length <= MOST_BYTES else None
        texts = asked.get("instances") if isinstance(asked, dict) else None
        if not isinstance(texts, list) or not 0 < len(texts) <= MOST_TEXTS:
            raise ValueError(f"a request is an object with 1 to {MOST_TEXTS} `instances`")
        if not all(isinstance(text, str) and len(text) <= LONGEST for text in texts):
            raise ValueError(f"an instance is a string of at most {LONGEST:,} characters")
        return texts

    def predictions(self, texts: list[str]) -> list[dict]:
        """The outputs of the graph, text by text."""
        found = self.server.model.signatures["serving_default"](texts=tf.constant(texts))
        columns = {name: values.numpy().tolist() for name, values in found.items()}
        columns["translations"] = [text.decode() for text in columns["translations"]]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="A SavedModel.")
    parser.add_argument("--name", default="translator", help="Of the model, in the address.")
    parser.add_argument("--port", type=int, default=8501, help="Of this machine; 0 for a free one.")
    options = parser.parse_args()
    server = http.server.HTTPServer(("127.0.0.1", options.port), Handler)
    server.path = f"/v1/models/{options.name}:predict"
    server.model = tf.saved_model.load(options.folder)
    print(f"http://127.0.0.1:{server.server_port}{server.path}", flush=True)
    server.serve_forever()
