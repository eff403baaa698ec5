"""Programs that people train with, over dscomm: DeepSpeed, Accelerate, and what torch has itself.

Each is run by two ranks over gloo and over dscomm, from the same seeds, and must end with the same
parameters (over_both.py). Models are tiny and random; nothing is downloaded. tests/clients/setup
makes .venv-clients with the packages; where one is missing its tests are skipped and say so:

    tests/clients/setup && .venv-clients/bin/python -m pytest tests/clients
"""

from __future__ import annotations

import os

# Before torch: ranks are forked, and an OpenMP pool of the parent would not survive that.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["DS_ACCELERATOR"] = "cpu"  # whatever else this machine has
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch  # noqa: E402

torch.set_num_threads(1)
