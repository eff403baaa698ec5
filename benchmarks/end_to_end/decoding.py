"""The common parts of the three decodes: the model, and the loop of a program around it."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from model import DECODED, TINY, Model, make_model

PROMPT = 16  # words
WARM_UP = 8  # of the generated words

# The logits [1, length, words] of words [1, length], from a position on.
Step = Callable[[torch.Tensor, int], torch.Tensor]


@functools.cache
def whole_model(quick: bool) -> Model:
    """In bfloat16. The parent makes it, and ranks are forked with it."""
    return make_model(TINY if quick else DECODED, torch.bfloat16).eval()


@torch.no_grad()
def decode(step: Step, quick: bool) -> tuple[dict[str, list[float]], Any]:
    """Seconds of each word that follows the prompt; the words, and a digest of the last logits."""
    generate(step, WARM_UP)
    words, seconds, logits = generate(step, 16 if quick else 48)
    last = logits.contiguous().view(torch.uint8).numpy().tobytes()
    return {"word": seconds}, {"words": words, "logits": hashlib.sha256(last).hexdigest()}


def generate(step: Step, count: int) -> tuple[list[int], list[float], torch.Tensor]:
    """Generates words greedily; returns them, the seconds of all but the first, and logits."""
    prompt = (torch.arange(PROMPT) * 5 % 91).unsqueeze(0)
    logits = step(prompt, 0)[:, -1]
    words, seconds = [int(logits.argmax())], []
    for position in range(PROMPT, PROMPT + count):
        began = time.perf_counter()
        logits = step(torch.tensor([[words[-1]]]), position)[:, -1]
        words.append(int(logits.argmax()))
        seconds.append(time.perf_counter() - began)
    return words, seconds, logits


def prepare(quick: bool) -> dict[str, str]:
    whole_model(quick)
    return {}
