"""`--push-to-hub` against a hub of our own on this machine."""

import base64
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
import yaml

import moemerge as package
import processes
import zoo
from moemerge.errors import CheckpointError, NumericalError
from repairs.calibration import cases


class Hub(ThreadingHTTPServer):
    """As much of the hub's protocol as an upload needs; remembers what came."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}  # of the repository
        self.objects: dict[str, bytes] = {}  # large files, by their hash
        self.repositories: list[str] = []
        self.known_token = "hf_known"
        self.full = False
        self.seen: list[str] = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self):
        self.server.seen.append(self.path)
        if self.headers.get("Authorization") != f"Bearer {self.server.known_token}":
            self.answer({"error": "Invalid username or password."}, 401)
        else:
            self.answer({"name": "me", "type": "user", "orgs": []})

    def do_PUT(self):
        body = self.body()
        self.server.objects[hashlib.sha256(body).hexdigest()] = body
        self.answer({})

    def do_POST(self):
        path, body = self.path, self.body()
        self.server.seen.append(path)
        hub = self.server
        if path == "/api/repos/create":
            hub.repositories.append(json.loads(body)["name"])
            self.answer({"url": f"{hub.url}/me/{hub.repositories[-1]}"})
        elif path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            kinds = {n: "lfs" if n.endswith(".safetensors") else "regular" for n in names}
            files = [{"path": n, "uploadMode": kinds[n], "shouldIgnore": False} for n in names]
            self.answer({"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            upload = {"upload": {"href": f"{hub.url}/store"}}
            asked = json.loads(body)["objects"]
            self.answer({"transfer": "basic", "objects": [{**o, "actions": upload} for o in asked]})
        elif path.endswith("/commit/main"):
            self.commit(body)
        else:
            self.answer({})

    def commit(self, body):
        hub = self.server
        if hub.full:
            self.answer({"error": "the quota is used up"}, 403)
            return
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.files[value["path"]] = hub.objects[value["oid"]]
        commit = {"commitUrl": f"{hub.url}/me/m/commit/0", "commitOid": "0" * 40, "success": True}
        self.answer(commit)


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def known_hub(hub, monkeypatch):
    """The same for the client in this process."""
    constants = {"ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}
    for name, value in constants.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_TOKEN", hub.known_token)
    monkeypatch.setattr("moemerge.checkpoint.hub.disable_progress_bars", lambda: None)
    yield hub
    huggingface_hub.close_session()


@pytest.fixture
def config(zoo_folder, tmp_path):
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(zoo.linear([zoo_folder("olmoe")])))
    return path


@pytest.fixture
def variables(hub, tmp_path):
    return {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.known_token, "HF_HOME": str(tmp_path)}


def environment(**variables):
    others = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return others | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **variables}


# The hub's address is read when its client is imported: here once more, in a process of its own.
READ_AGAIN = "import importlib, huggingface_hub.constants as read; importlib.reload(read)\n"


def moemerge(*words, **variables):
    return processes.python(READ_AGAIN + processes.COMMAND, *words, env=environment(**variables))


def test_a_merge_is_uploaded_with_its_card(hub, variables, config, tmp_path):
    out = tmp_path / "out"
    command = ["-m", "moemerge", "merge", config, out, "--push-to-hub", "me/m"]
    done = processes.interpreter(*command, env=environment(**variables))
    assert done.returncode == 0, done.stderr
    assert f"uploaded: {hub.url}/me/m" in done.stderr
    assert hub.repositories == ["m"]
    written = {p.name: p.read_bytes() for p in out.iterdir()}
    assert hub.files == written
    assert {"README.md", "config.json", "moemerge_config.yml"} <= hub.files.keys()


@pytest.mark.parametrize("verb", ["calibrate", "refit"])
def test_a_repaired_model_is_uploaded_once_it_is_whole(verb, known_hub, zoo_folder, tmp_path):
    hub, job, out = known_hub, getattr(package, verb), tmp_path / "out"
    case = cases.make_case(zoo_folder("olmoe", num_hidden_layers=2), tmp_path / "case", rows=6)
    given = {"sources": case.sources, "data": case.data, "push_to_hub": "me/m", "layers": "1"}
    given |= {"ridge": 0.1, "holdout": 0} if verb == "refit" else {}
    bad = zoo.spoilt(case.merged, tmp_path / "bad", "model.layers.1.self_attn.q_proj.weight")
    with pytest.raises(NumericalError):
        job(bad, out, **given)
    assert (hub.repositories, hub.files) == ([], {})
    job(case.merged, out, **given)
    assert hub.repositories == ["m"]
    assert hub.files == {p.name: p.read_bytes() for p in out.iterdir()}


def test_tuning_asks_before_any_work(tmp_path):
    with pytest.raises(CheckpointError, match="'me/m/x' cannot name a model on the hub"):
        package.tune("no/model", tmp_path / "out", data=[], push_to_hub="me/m/x")


def test_a_failed_upload_leaves_out_and_says_so(hub, variables, config, tmp_path):
    hub.full = True
    out = tmp_path / "out"
    done = moemerge("run", config, out, "--push-to-hub", "me/m", "-q", **variables)
    assert done.returncode == 3
    assert f"{out} is written and whole, but could not be uploaded to me/m" in done.stderr
    assert f"hf upload me/m {out}" in done.stderr
    assert "Traceback" not in done.stderr
    assert (out / "config.json").exists()
    assert hub.files == {}


@pytest.mark.parametrize(
    ("repo", "wrong", "words"),
    [
        ("me/m", {"HF_TOKEN": "hf_other"}, "hf auth login"),
        ("me/m", {"HF_TOKEN": ""}, "hf auth login"),
        ("me/m", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached"),
        ("me/m", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ("me/m/x", {}, "expected NAME or ORG/NAME"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_any_work(
    repo, wrong, words, hub, variables, config, tmp_path
):
    out = tmp_path / "out"
    done = moemerge("merge", config, out, "--push-to-hub", repo, **{**variables, **wrong})
    assert done.returncode == 3
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()
    assert hub.repositories == []
