"""What a job does with GPUs, in a process whose libnvidia-ml.so.1 is the test's: a question a line, an answer a line.

A question is {"what": "survey", "release" or "lease", "folder", "mask", "need", "cfg"}; the answer the record, or
{"error": message} of a UserError. A lease answers {"uuids", "child": what a child's CUDA would see}, and is held until
the next line comes.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from eagle3lib import gpus
from eagle3lib.config import GpusConfig
from eagle3lib.errors import UserError
from eagle3lib.leases import Leases

# In the background of a shell it is ignored, and that is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)

CHILD = "echo $CUDA_VISIBLE_DEVICES"


def show(value):
    print(json.dumps(value), file=sys.__stdout__, flush=True)


def answer(what, folder, mask, need, cfg):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if mask is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = mask
    need, cfg, leases = gpus.Need(**need), GpusConfig(**cfg), Leases(Path(folder) / "store")
    if what == "survey":
        show(gpus.survey())
    elif what == "release":
        show(gpus.release(need, cfg, leases))
    else:
        with gpus.lease(need, cfg, leases, "a test") as uuids:
            child = subprocess.run(CHILD, shell=True, capture_output=True, text=True, check=True).stdout.strip()
            show({"uuids": uuids, "child": child})
            sys.stdin.readline()


sys.stdout = sys.stderr  # what our code prints is no answer
for line in sys.stdin:
    if line.strip():
        try:
            answer(**json.loads(line))
        except UserError as error:
            show({"error": str(error)})
