"""Ask the cloud whether it is about to take this spot machine away.

    save = EverySteps(500) | OnPreemption(when="spot:on_aws")      # or on_google, on_azure

Copy this file beside the training script. The training calls the function about once a second, on a thread of
its own. A service that does not answer is logged once, and asked again.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request

AWS = AZURE = "http://169.254.169.254"
GOOGLE = "http://metadata.google.internal"


def on_aws() -> bool:
    """Return whether EC2 has announced the interruption: two minutes before it, by IMDSv2."""
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _ask(f"{AWS}/latest/api/token", lifetime, method="PUT")
    try:
        _ask(f"{AWS}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except urllib.error.HTTPError as error:
        if error.code == 404:  # nothing is announced
            return False
        raise
    return True


def on_google() -> bool:
    """Return whether Compute Engine has announced the preemption: 30 seconds before it."""
    url = f"{GOOGLE}/computeMetadata/v1/instance/preempted"
    return _ask(url, {"Metadata-Flavor": "Google"}) == "TRUE"


def on_azure() -> bool:
    """Return whether a scheduled event evicts a machine: 30 seconds before it."""
    url = f"{AZURE}/metadata/scheduledevents?api-version=2020-07-01"
    events = json.loads(_ask(url, {"Metadata": "true"}))["Events"]
    return any(event["EventType"] == "Preempt" for event in events)


def _ask(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode().strip()
