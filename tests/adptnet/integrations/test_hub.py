"""A model that was pushed to a server is loaded from it. The server runs on this machine."""

import base64
import http.server
import json
import os
import re
import subprocess
import sys
import threading

import pytest
import torch
from torch.testing import assert_close

import adptnet
from adptnet.errors import CheckpointError, InputError
from adptnet.integrations.hub import push_to_hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The part of the Hub's interface that uploads small files in a commit, and downloads them."""

    files: dict[str, bytes]

    def reply(self, content=b"", kind="application/json", status=200, **headers):
        self.send_response(status)
        named = {"Content-Type": kind, "Content-Length": str(len(content)), "X-Repo-Commit": COMMIT, **headers}
        for name, value in named.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if self.path.endswith("/repos/create"):
            self.reply(json.dumps({"url": f"{self.server.address}/ada/layer", "id": "ada/layer"}).encode())
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self.reply(json.dumps({"files": files}).encode())
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.address}/ada/layer/commit/{COMMIT}"
            self.reply(json.dumps({"commitUrl": url, "commitOid": COMMIT, "success": True}).encode())
        else:
            self.reply(b"{}")

    def do_GET(self):
        found = re.fullmatch(r"/ada/layer/resolve/[^/]+/(.+)", self.path)
        if found and found[1] in self.files:
            content = self.files[found[1]]
            self.reply(content, "application/octet-stream", ETag=f'"{hash(content)}"')
        elif self.path.startswith("/api/models/ada/layer"):
            self.reply(json.dumps({"id": "ada/layer", "sha": COMMIT, "siblings": []}).encode())
        else:
            self.reply(b"{}", status=404, **{"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def log_message(self, *text):
        pass


@pytest.fixture
def hub(tmp_path):
    """Start the server; yield its files and a function that runs Python code with the Hub at its address."""
    FakeHub.files = {}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(code):
        settings = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_test"}
        settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env={**os.environ, **settings}, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )

    yield FakeHub.files, run
    server.shutdown()
    server.server_close()


def test_a_pushed_model_is_loaded_by_its_name(hub, tmp_path):
    pytest.importorskip("huggingface_hub")
    files, run = hub
    pushed = run(
        "import torch, adptnet\n"
        "from adptnet.integrations.hub import push_to_hub\n"
        "model = adptnet.ADPTNet(8, beta=1.0)\n"
        "adptnet.save(model, 'here.safetensors')\n"
        "print(push_to_hub(model, 'ada/layer'))"
    )
    assert pushed.returncode == 0, pushed.stderr
    assert COMMIT in pushed.stdout
    assert set(files) == {"README.md", "model.safetensors"}
    assert 'adptnet.load("ada/layer")' in files["README.md"].decode()
    loaded = run("import adptnet; adptnet.save(adptnet.load('ada/layer'), 'there.safetensors')")
    assert loaded.returncode == 0, loaded.stderr
    assert (tmp_path / "here.safetensors").read_bytes() == (tmp_path / "there.safetensors").read_bytes()
    missing = run("import adptnet; adptnet.load('ada/nothing')")
    assert "CheckpointError: There is no file ada/nothing, and model.safetensors of the repository" in missing.stderr


def test_a_folder_is_loaded(tmp_path):
    layer, x = adptnet.ADPTNet(8, beta=1.0), torch.randn(2, 5, 8)
    adptnet.save(layer, tmp_path / "model.safetensors")
    assert_close(adptnet.load(tmp_path)(x)[0], layer(x)[0])
    with pytest.raises(CheckpointError, match="There is no file"):
        adptnet.load(tmp_path / "other" / "name")


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no file ada/layer\. To download it .* pip install 'adptnet\[hf\]'"):
        adptnet.load("ada/layer")
    with pytest.raises(InputError, match=r"pip install 'adptnet\[hf\]'"):
        push_to_hub(adptnet.ADPTNet(4), "ada/layer")
    (tmp_path / "ada").mkdir()
    with pytest.raises(CheckpointError, match=r"There is no file ada/layer\.$"):
        adptnet.load("ada/layer")
