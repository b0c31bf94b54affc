"""OpenVINO GenAI's beam search, as a worker: ``python openvino_worker.py MODEL --attention SDPA|PA --threads N``.

It has two: over a cache of one row per beam (SDPA), and over pages with continuous batching (PA). Left alone it
computes in bfloat16 with an 8-bit K/V cache on processors that can; three settings make it float32. Pages are not kept
for the next call with the same prompt, which would leave the prompt out of every round but the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy
import openvino
import openvino_genai
from answering import serve

FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


class OpenVINO:
    """A loaded and compiled model.

    Args:
        path: folder of the converted model.
        attention: ``"SDPA"`` or ``"PA"``.
        threads: of inference.
    """

    def __init__(self, path: str, attention: str, threads: int) -> None:
        self.versions = {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}
        settings: dict[str, Any] = {**FLOAT32, "INFERENCE_NUM_THREADS": threads, "ATTENTION_BACKEND": attention}
        if attention == "PA":
            settings["scheduler_config"] = _scheduler()
        self._pipeline = openvino_genai.LLMPipeline(path, "CPU", **settings)

    def prepare(self, asked: dict[str, Any]) -> Callable[[], Any]:
        ids = numpy.array(asked["prompts"], dtype=numpy.int64)  # [B, P]
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        config = openvino_genai.GenerationConfig()
        config.num_beams = asked["beams"]
        config.num_return_sequences = 1
        config.max_new_tokens = asked["new_tokens"]
        config.ignore_eos = True
        return lambda: self._pipeline.generate(inputs, config)

    def sequences(self, found: Any) -> list[list[int]]:
        return [list(tokens) for tokens in found.tokens]


def _scheduler() -> Any:
    """Room for every cell's keys and values, and for its prompts and its beams in one forward pass each."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.max_num_batched_tokens = 4096
    scheduler.max_num_seqs = 1024
    scheduler.enable_prefix_caching = False
    return scheduler


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--attention", choices=("SDPA", "PA"), required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(lambda: OpenVINO(arguments.model, arguments.attention, arguments.threads))
