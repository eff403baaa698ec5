"""A stand-in for ssh, as called by mpirun: remote_shell.py HOST WORD...

Passes the command to the test process, which can enter the host, and exits as the command does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

folder = Path(os.environ["TEST_CLUSTER_FOLDER"])
host = sys.argv[1]
order = folder / f"order-{host}"
order.write_text(json.dumps(sys.argv[1:]))
order.rename(order.with_suffix(".json"))  # appears complete or not at all
deadline = time.monotonic() + float(os.environ["TEST_CLUSTER_LIMIT_S"])
while not (ended := folder / f"ended-{host}").exists() or not ended.read_text():
    if time.monotonic() > deadline:
        raise SystemExit(f"{host} did not end what it was told to start")
    time.sleep(0.05)
raise SystemExit(int(ended.read_text()))
