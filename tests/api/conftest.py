from __future__ import annotations

import os
import sys
from pathlib import Path

# Before torch: ranks are forked, and an OpenMP pool of the parent would not survive that.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[1] / "torch"))
