from __future__ import annotations

import os

# Before torch is imported, because ranks are forked, and OpenMP's threads do not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")
