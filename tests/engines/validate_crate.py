"""`rocrate-validator` without a network: the RO-Crate context comes out of the package `rocrate`, which has a later one
with the same terms (but for the four of Bioschemas that have moved since 1.1).

    python validate_crate.py FOLDER    # prints the issues as JSON
"""

import io
import json
import sys
from pathlib import Path

import requests
import rocrate
import urllib3
from rocrate_validator import models, services
from rocrate_validator.utils import document_loader

BIOSCHEMAS = "https://bioschemas.org/"
MOVED = {
    "ComputationalWorkflow": f"{BIOSCHEMAS}ComputationalWorkflow",
    "FormalParameter": f"{BIOSCHEMAS}FormalParameter",
    "input": f"{BIOSCHEMAS}ComputationalWorkflow#input",
    "output": f"{BIOSCHEMAS}ComputationalWorkflow#output",
}
CONTEXT = json.loads(Path(rocrate.__file__).with_name("data").joinpath("ro-crate.jsonld").read_text())


def send(self, request, **_):
    if request.url != "https://w3id.org/ro/crate/1.1/context":
        raise requests.ConnectionError(f"{request.url}: not asked for by our crates")
    response = requests.Response()
    response.status_code, response.url, response.request = 200, request.url, request
    response.headers["Content-Type"] = "application/ld+json"
    body = io.BytesIO(json.dumps({"@context": CONTEXT["@context"] | MOVED}).encode())
    response.raw = urllib3.HTTPResponse(body, response.headers, 200, preload_content=False, request_url=request.url)
    return response


requests.adapters.HTTPAdapter.send = send
document_loader._fetch_json_ld = lambda url: json.load(send(None, requests.Request("GET", url).prepare()).raw)
result = services.validate(
    services.ValidationSettings(
        rocrate_uri=sys.argv[1],
        profile_identifier="provenance-run-crate",
        requirement_severity=models.Severity.RECOMMENDED,
        abort_on_first=False,
    )
)
found = [{"severity": i.severity.name, "check": i.check.name, "message": i.message} for i in result.get_issues()]
print(json.dumps({"issues": found, "profiles": sorted(profile.identifier for profile in result.context.profiles)}))
