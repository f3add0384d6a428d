"""The files of examples/clusters are what bash, torchrun and Kubernetes read, and ask the clouds rightly."""

from __future__ import annotations

import http.server
import json
import re
import runpy
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.run import parse_args

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"
BATCH, JOB = CLUSTERS / "slurm.sbatch", yaml.safe_load((CLUSTERS / "job.yaml").read_text(encoding="utf-8"))


waits = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torchrun 2.11 has no --shutdown-timeout")


@waits
def test_the_batch_script_is_bash_and_asks_for_the_signal_that_torchrun_passes_on():
    subprocess.run(["bash", "-n", BATCH], check=True)
    text = BATCH.read_text(encoding="utf-8").replace("\\\n", " ")
    [command] = re.findall(r"srun torchrun (.*)", text)
    given = parse_args(re.sub(r"\$\w+", "1", command.replace('"', "")).split())
    name, seconds = re.findall(r"^#SBATCH --signal=(\w+)@(\d+)$", text, re.MULTILINE)[0]
    assert f"SIG{name}" in given.signals_to_handle.split(",")
    assert 30 < given.shutdown_timeout < int(seconds)


@waits
def test_the_job_gives_the_last_save_the_time_that_torchrun_waits_and_counts_no_drain_as_a_failure():
    pod = JOB["spec"]["template"]["spec"]
    program, *arguments = pod["containers"][0]["command"]
    assert (JOB["apiVersion"], JOB["kind"], program) == ("batch/v1", "Job", "torchrun")
    assert 30 < parse_args(arguments).shutdown_timeout < pod["terminationGracePeriodSeconds"]
    [rule] = JOB["spec"]["podFailurePolicy"]["rules"]  # which needs this restartPolicy
    assert (rule["action"], pod["restartPolicy"]) == ("Ignore", "Never")
    claimed = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert claimed == {volume["name"] for volume in pod["volumes"]}


class Metadata(http.server.BaseHTTPRequestHandler):
    """What the three clouds answer on their machines; `announced` when one is to be taken away."""

    announced = False

    def answer(self, ok, text):
        self.send_response(200 if ok else 404)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self):
        self.answer("X-aws-ec2-metadata-token-ttl-seconds" in self.headers, "token")

    def do_GET(self):
        if "spot/instance-action" in self.path:
            assert self.headers["X-aws-ec2-metadata-token"] == "token"
            self.answer(self.announced, '{"action": "terminate"}')
        elif self.path.endswith("/instance/preempted"):
            self.answer(self.headers["Metadata-Flavor"] == "Google", "TRUE" if self.announced else "FALSE")
        else:
            events = [{"EventType": "Reboot"}, *([{"EventType": "Preempt"}] * self.announced)]
            self.answer(self.headers["Metadata"] == "true", json.dumps({"Events": events}))

    def log_message(self, *_arguments):
        pass


@pytest.mark.parametrize("cloud", ["on_aws", "on_google", "on_azure"])
def test_a_spot_machine_hears_of_its_end_and_of_no_other_event(cloud, monkeypatch):
    monkeypatch.setattr(Metadata, "announced", False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        spot = runpy.run_path(str(CLUSTERS / "spot.py"))
        place = f"http://127.0.0.1:{server.server_port}"
        spot[cloud].__globals__.update(AWS=place, GOOGLE=place, AZURE=place)
        assert not spot[cloud]()
        monkeypatch.setattr(Metadata, "announced", True)
        assert spot[cloud]()
        server.shutdown()
